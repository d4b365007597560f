# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedRep: a shared body, and a head that stays with each client.

The problem is ``min over body, head_1 .. head_n of 1/n sum_i f_i(body, head_i)``, body
and head being two parts of the parameters. A round, for every client i of the cohort::

    head_i <- head_steps times:  head_i <- head_i - rate * grad_head f_i(body, head_i)
    b_i    <- body, then steps times:  b_i <- b_i - rate * grad_body f_i(b_i, head_i)
    body   <- body + mean (b_i - body)

    personal_i = body with head_i

Only the body travels, in both directions, and only it is counted: where the head is, a
message has None. Where everything is body it is FedAvg, where everything is head it is
training alone. ``shared`` has the head that everybody began with: no model to use.

Where this differs from the paper: it does not, with plain SGD; its analysis takes exact
minima for heads. A client that never took part still has the initial head.

Reference: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations
for personalized federated learning", ICML 2021, arXiv:2102.07078.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from fedblend import keys, trees
from fedblend.checks import PATHS, gate
from fedblend.core import Algorithm, Loss, Needs, PyTree, from_params
from fedblend.local import STEPS, WORK, Steps, Work, descend, local_update
from fedblend.losses import objective
from fedblend.registry import NewClient, algorithm


class FedRepClient(NamedTuple):
    """The state of a client: its head, None where the body is."""

    head: PyTree


@algorithm(keeps="head", new_client=NewClient(steps="head_steps"))
@gate(**WORK, head=PATHS, head_steps=STEPS)
def fedrep(
    loss: Loss,
    work: Work,
    *,
    head: Callable[[str], bool] | Sequence[str],
    head_steps: Steps,
) -> Algorithm:
    """A shared body and personal heads, trained in turn.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work on the body; its optimizer and batch size also serve the head.
        head: names of the parts of the model that are the head, such as ["last"]; or
            a function of a path, such as "last/weight".
        head_steps: number of steps on the head in a round, an array over clients, or
            ``Epochs``.

    Example:
        >>> import jax, fedblend as fb
        >>> model = fb.models.mlp(4, 3, hidden=(8,))
        >>> loss = fb.losses.cross_entropy(model.apply)
        >>> algorithm = fb.fedrep(
        ...     loss,
        ...     fb.Work(0.1, steps=1, batch_size=10),
        ...     head=lambda path: path.startswith("last"),
        ...     head_steps=5,
        ... )
        >>> _, state = algorithm.enroll(model.init(jax.random.key(0)), None, None)
        >>> sum(leaf.size for leaf in jax.tree.leaves(state))
        27
    """
    is_head = PATHS("fedrep: head", head)

    def part(tree: PyTree, wanted: bool) -> PyTree:
        """The head or the body, None where the other is."""

        def pick(path, leaf):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return leaf if is_head(name) == wanted else None

        return jax.tree_util.tree_map_with_path(pick, tree)

    def at(body, own, batch):
        return objective(loss, trees.fill(body, own), batch)

    def enroll(params, shard, key):
        return (), FedRepClient(part(params, True))

    def client(down, client, shard, key):
        down = tell(down, ())
        own, _ = descend(
            lambda here, batch: jax.grad(at, 1)(down.shared, here, batch),
            client.head,
            shard,
            keys.named(key, "head"),
            work=work._replace(steps=head_steps),
            round=down.round,
        )

        def direction(here, batch):
            return jax.grad(at)(here, own, batch)

        return local_update(direction, down, shard, key, work=work), FedRepClient(own)

    def server(aggregate, down, server, central, key):
        shared = trees.add_where_given(down.shared, aggregate.mean.delta)
        return down._replace(shared=shared), server

    def personal(down, client, shard, key):
        return trees.fill(part(down.shared, False), client.head)

    def tell(down, request):
        body, correction = part(down.shared, False), part(down.correction, False)
        return down._replace(shared=body, correction=correction)

    needs = Needs(weights="uniform")
    return Algorithm(
        enroll, from_params, client, server, personal, tell=tell, needs=needs
    )
