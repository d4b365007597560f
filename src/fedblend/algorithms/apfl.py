# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL: every client learns a model of its own, and how much of it to mix in.

Client i deploys ``mix_i = alpha_i w + (1 - alpha_i) v_i``: w is the shared model, v_i
its own. A round of Algorithm 1, for every client i of the cohort::

    w_i <- w, then steps times, all from the old w_i, v_i and alpha_i on one batch:
        w_i     <- w_i - rate * grad f_i(w_i)                              (6)
        v_i     <- v_i - rate * grad in v_i of f_i(mix_i)                  (7)
        alpha_i <- alpha_i - rate * <w_i - v_i, grad f_i(mix_i)>,          (10)
                   clipped to [0, 1]
    w <- mean of w_i                                                       (8)

Clients outside of the cohort keep v_i and alpha_i. Autodiff writes (7), with its factor
``1 - alpha_i``, and (10).

Where this differs from the paper: its alpha is the weight of v, here alpha is the
weight of the shared model, as everywhere in fedblend. Algorithm 1 as printed has tau -
1 steps between two averages, its text tau; ``steps`` is that of the text. (10) is
indexed by steps while the text says once per round: ``learn`` has both. (10) as printed
may leave [0, 1], which (9) forbids. Client weights other than uniform, any optimizer,
an optimizer of alpha's own and other rows for (7) and (10) are allowed, see
``apfl_alpha``. The output of Algorithm 1, an average over all steps, is
``apfl_averaged``. For any fixed alpha < 1 long training leads mix_i to client i's own
minimizer, whatever w is (with more than one step a round up to a drift that falls with
the rate): alpha acts through how long and with which rates one trains.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461.
"""

from functools import partial
from typing import NamedTuple

import jax

from fedblend import keys, mixing, trees
from fedblend.algorithms.apfl_alpha import HAND_BACK, RULES, Learn, Learning
from fedblend.algorithms.apfl_steps import Gradients, Variables, local_steps
from fedblend.algorithms.fedavg import fedavg
from fedblend.batches import per_client
from fedblend.checks import FLAG, ByClient, gate
from fedblend.core import Algorithm, Batch, Loss, PyTree, Up
from fedblend.local import WORK, Optimizer, Work, step_sum_of
from fedblend.losses import gradient, objective
from fedblend.mixing import MIXING, Mixing
from fedblend.registry import STEP_BY_STEP, algorithm
from fedblend.solvers import Solver


class ApflClient(NamedTuple):
    """The state of client i: v_i, alpha_i, and w_i unless ``aggregated``."""

    personal: PyTree
    alpha: PyTree
    last: PyTree = ()


def gradients(loss: Loss, mix: Mixing = mixing.parameters) -> Gradients:
    """The gradients of the steps (6), (7) and (10), all on one batch."""

    def mixture_loss(here: Variables, batch: Batch) -> jax.Array:
        return objective(loss, mix(here.alpha, here.shared, here.personal), batch)

    def at(here: Variables, batch: Batch) -> Variables:
        of_mixture = jax.grad(mixture_loss)(here, batch)  # (7) and (10)
        return of_mixture._replace(shared=gradient(loss)(here.shared, batch))  # (6)

    return at


@algorithm(new_client=STEP_BY_STEP._replace(options={"aggregated": True}))
@gate(**WORK, **RULES, hand_back=HAND_BACK, fresh=FLAG, mix=MIXING, aggregated=FLAG)
def apfl(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    learn: Learn = "step",
    alpha_rate: Optimizer | None = None,
    held_out: float = 0.0,
    hand_back: int | None = None,
    fresh: bool = False,
    mix: Mixing = mixing.parameters,
    local: Solver | None = None,
    aggregated: bool = True,
) -> Algorithm:
    """FedAvg's shared model, and a personal model and mixing weight on every client.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: local work of a round; w and v each have such an optimizer.
        alpha: first weight of the shared model; a number, or an array over clients.
        learn: when alpha moves: "step", "round" (with the first step) or "fixed".
        alpha_rate: optimizer of alpha, a number for plain steps; None for that of
            ``work``.
        held_out: fraction of a client's training rows on which alpha alone learns, in
            batches of the same size; 0 for the batches of v. A client with too few rows
            to hold out one keeps its alpha.
        hand_back: number of rounds after which w and v train on held-out rows too, and
            alpha stays; None for never.
        fresh: draw another batch for v (and alpha) than for w.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
        local: how v starts, from ``fedblend.solvers``; None for the initial parameters.
        aggregated: mix v with the shared model of the server; if False, with the
            client's last w_i, before the server averaged.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> data, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> loss = fb.datasets.quadratic_loss
        >>> work = fb.Work(0.1, steps=2, batch_size=None)
        >>> run = fb.simulate(fb.apfl(loss, work, alpha=0.5), jnp.zeros(2), data,
        ...                   jax.random.key(0), rounds=50).complete()
        >>> measured = fb.metrics.mean_loss(loss)
        >>> own = fb.Batch(data.train.rows(0))
        >>> bool(measured(run.personal(0), own) < measured(run.shared, own))
        True
    """
    learning = Learning(learn, alpha_rate, held_out, hand_back).checked()
    train = partial(
        local_steps, gradients(loss, mix), work=work, learning=learning, fresh=fresh
    )
    inner = fedavg(loss, work)  # its server is (8)

    def enroll(params, shard, key):
        own = keys.named(key, "local model")
        personal = params if local is None else local(params, shard, own)[0]
        last = () if aggregated else params
        return (), ApflClient(personal, per_client(alpha, shard), last)

    def client(down, client, shard, key):
        start = Variables(down.shared, client.personal, client.alpha)
        reached, mean, rows = train(start, down, shard, key)
        delta = trees.subtract(reached.shared, down.shared)
        step_sum = step_sum_of(work, rows, down.round)
        last = () if aggregated else reached.shared
        state = ApflClient(reached.personal, reached.alpha, last)
        return Up(delta, mean.shared, step_sum=step_sum), state

    def personal(down, client, shard, key):
        shared = down.shared if aggregated else client.last
        return mix(client.alpha, shared, client.personal)

    def info(client):
        return {"alpha": client.alpha}

    needs = inner.needs._replace(weights="uniform")
    return inner._replace(
        enroll=enroll, client=client, personal=personal, info=info, needs=needs
    )
