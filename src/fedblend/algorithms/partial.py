# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partial personalization: a part of the model travels, the rest stays with its client.

The problem is ``min over u, v_1 .. v_n of 1/n sum_i f_i(u, v_i)``: u are the shared
parameters, v_i those that stay with client i. A round, for every client i of the
cohort, in one of two orders::

    "alternate"   v_i <- personal_steps times:  v_i <- v_i - rate * grad_v f_i(u, v_i)
                  u_i <- u, steps times:        u_i <- u_i - rate * grad_u f_i(u_i, v_i)
    "together"    u_i <- u, then steps times, both from the old u_i and v_i:
                  (u_i, v_i) <- (u_i, v_i) - rate * grad f_i(u_i, v_i)

    u <- u + mean (u_i - u)
    personal_i = u with v_i

The first is FedAlt, the second FedSim. Which parameters are v_i makes FedPer, FedRep,
LG-FedAvg, FedBN and BitFit of them. With 0 ``personal_steps`` v_i stays where it began,
as the head of FedBABU does. With nothing personal it is FedAvg, with everything
personal training alone.

Only u travels, in both directions, and only it is counted: where v is, a message has
None. ``shared`` has the v that everybody began with: no model to use.

Where this differs from the paper: it does not, with plain SGD. An optimizer at the
server takes the mean of u_i - u as a gradient, as ``fedopt`` does. Any optimizer is
allowed, of u and of v_i, each restarted in every round. In "alternate" the batches of
v_i are drawn independently of those of u_i. A client that never took part has the v
that everybody began with.

Reference: Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "Federated learning with
partial model personalization", ICML 2022, arXiv:2204.03809.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import optax

from fedblend import keys, trees
from fedblend.batch_statistics import take_step
from fedblend.checks import PATHS, PartNames, optional, require_parts, words
from fedblend.core import (
    Algorithm,
    Batch,
    Down,
    Key,
    Loss,
    Needs,
    PyTree,
    Shard,
    Up,
    Wire,
    start_with_params,
)
from fedblend.errors import UserError
from fedblend.local import (
    OPTIMIZER,
    STEPS,
    Optimizer,
    ServerOptimizer,
    Steps,
    Work,
    descend,
    local_update,
    plan_steps,
    resolve,
)
from fedblend.losses import objective
from fedblend.registry import STEP_BY_STEP, algorithm


class Parts(NamedTuple):
    """The two parts of the parameters, None in each where the other is."""

    shared: PyTree
    personal: PyTree


def mean_loss(loss: Loss, here: Parts, batch: Batch) -> jax.Array:
    """The mean loss of both parts, put together."""
    return objective(loss, trees.fill(here.shared, here.personal), batch)


def alternate(
    loss: Loss, work: Parts, down: Down, own: PyTree, shard: Shard, key: Key
) -> tuple[Up, PyTree]:
    """Steps on v at the u that was broadcast, then steps on u at the new v.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work on each part.
        down: the server's message, with u.
        own: the client's v.
        shard: its rows.
        key: randomness of the batches.

    Returns:
        The answer to the server, and the new v.
    """

    def own_slope(here, batch):
        return jax.grad(lambda v: mean_loss(loss, Parts(down.shared, v), batch))(here)

    # FedRep drew the batches of its head by this name before it was a case of this.
    first = keys.named(key, "head")
    own, _ = descend(own_slope, own, shard, first, work=work.personal, round=down.round)

    def slope_of_shared(here, batch):
        return jax.grad(lambda u: mean_loss(loss, Parts(u, own), batch))(here)

    return local_update(slope_of_shared, down, shard, key, work=work.shared), own


def together(
    loss: Loss, work: Parts, down: Down, own: PyTree, shard: Shard, key: Key
) -> tuple[Up, PyTree]:
    """Steps on u and v at once, both from the old ones and on the same batch.

    Arguments and result as of ``alternate``; of the work on v the optimizer counts.
    """
    main: Work = work.shared
    steps, _ = plan_steps(shard, main)
    rules: dict[Any, optax.GradientTransformation] = {
        name: resolve(one.optimizer, down.round, steps)
        for name, one in work._asdict().items()
    }

    def direction(here, batch):
        return jax.grad(lambda parts: mean_loss(loss, parts, batch))(here)

    reached, mean_gradient = descend(
        direction,
        Parts(down.shared, own),
        shard,
        key,
        work=main._replace(optimizer=optax.partition(rules, Parts(*rules))),
        round=down.round,
        correction=Parts(down.correction, None),
    )
    delta = trees.subtract(reached.shared, down.shared)
    return Up(delta, mean_gradient.shared), reached.personal


PERSONAL_STEPS = dataclasses.replace(STEPS, least=0, optional=True)
BY_STEP = STEP_BY_STEP._replace(options={"personal_steps": None})


class PartialClient(NamedTuple):
    """The state of a client: its v_i, None where the shared parameters are."""

    personal: PyTree


@algorithm(keeps="personal", new_client=BY_STEP, keys={"server_optimizer": "server"})
def partial(
    loss: Loss,
    work: Work,
    *,
    personal: PartNames,
    order: Annotated[str, words("alternate", "together")] = "alternate",
    personal_steps: Annotated[Steps | None, PERSONAL_STEPS] = None,
    personal_rate: Annotated[Optimizer | None, optional(OPTIMIZER)] = None,
    server_optimizer: ServerOptimizer = 1.0,
) -> Algorithm:
    """A part of the model is shared, the rest stays with each client.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work on the shared part; its batch size also serves the personal.
        personal: names of the parts of the model that stay, such as ["last"]; or a
            function of a path, such as "last/weight".
        order: "alternate" for steps on the personal part before those on the shared
            one, "together" for steps on both at once.
        personal_steps: number of steps on the personal part in a round, if they
            alternate; an array over clients, or ``Epochs``. None for those of ``work``.
        personal_rate: optimizer of the personal part, a number for plain steps; None
            for that of ``work``.
        server_optimizer: optimizer of the server, a number for plain steps.

    Example:
        >>> import jax, fedblend as fb
        >>> model = fb.models.mlp(4, 3, hidden=(8,))
        >>> loss = fb.losses.cross_entropy(model.apply)
        >>> work = fb.Work(0.1, steps=5, batch_size=10)
        >>> algorithm = fb.partial(loss, work, personal=["last"], order="together")
        >>> _, state = algorithm.enroll(model.init(jax.random.key(0)), None, None)
        >>> sum(leaf.size for leaf in jax.tree.leaves(state))
        27
    """
    stays = PATHS("partial: personal", personal)
    if order == "together" and personal_steps is not None:
        allowed = 'left out, as order = "together" needs'
        raise UserError("partial: personal_steps", personal_steps, allowed)
    own: dict[str, Any] = {"optimizer": personal_rate, "steps": personal_steps}
    own = {field: value for field, value in own.items() if value is not None}
    each = Parts(work, work._replace(**own))

    def part(tree: PyTree, wanted: bool) -> PyTree:
        """The personal or the shared part, None where the other is."""
        return trees.map_with_path(
            lambda path, leaf: leaf if stays(path) == wanted else None, tree
        )

    train = alternate if order == "alternate" else together

    transform = resolve(server_optimizer, 0, 1)

    def start(params, joins, central, key):
        down, _ = start_with_params(params, joins, central, key)
        return down, transform.init(part(params, False))

    def enroll(params, shard, key):
        require_parts(stays, params)
        return (), PartialClient(part(params, True))

    def client(down, client, shard, key):
        up, own = train(loss, each, tell(down, ()), client.personal, shard, key)
        return up, PartialClient(own)

    def server(aggregate, down, server, central, key):
        ascent = trees.scale(-1, aggregate.mean.delta)
        here = part(down.shared, False)
        moved, server = take_step(transform, ascent, server, here, ascent, momentum=1.0)
        return down._replace(shared=trees.fill(moved, down.shared)), server

    def personal_model(down, client, shard, key):
        return trees.fill(part(down.shared, False), client.personal)

    def tell(down, request):
        shared, correction = part(down.shared, False), part(down.correction, False)
        return down._replace(shared=shared, correction=correction)

    halves = (enroll, start, client, server, personal_model)
    return Algorithm(*halves, wire=Wire(tell=tell), needs=Needs(weights="uniform"))
