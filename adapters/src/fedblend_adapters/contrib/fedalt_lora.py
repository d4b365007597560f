# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedALT: a client's own adapter is trained beside the frozen mean of all others'.

In ``contrib``: no number of its paper is reproduced, no bound of it is checked.

Parameters are those of ``gated_lora``, or of ``two_adapters``: pairs of adapters of the
same weight, "personal" and "shared", and what weighs them. Client i trains its own
personal_i (the paper's individual LoRA) and its weights; shared_i (the rest-of-world
LoRA) is the mean of the others' and stands still. A round, for every client i of n::

    shared_i <- 1/(n - 1) sum over j != i of personal_j  =  M + (M - personal_i)/(n - 1)
    steps times, (personal_i, gate_i) from both old ones:
        minus rate * their gradients of f_i(personal_i, shared_i, gate_i)
    M <- M + p * mean (personal_i' - personal_i),   p = received weight / all weight

    personal model_i = personal_i, shared_i and gate_i

The server never sees an adapter of one client. It keeps M, the mean of what all clients
have, also of those outside of the cohort, and a client takes its own share out. Nobody
starts a round from a mean. ``shared``, for use without a client, has M as both adapters
of a pair.

A new client trains an adapter and a gate of its own beside the mean of all adapters.

Where this differs from the paper: the same means come about in another way, and with
partial cohorts, of which the paper has none, M has the last adapter of every client.
What clipping, noise or a compressor makes of updates is in M and not in personal_i, so
that shared_i is near the mean of the others' then. All clients start with one adapter;
the authors' code draws one for each, and the gate at random. Here the gate starts at
zero, equal weights of both adapters; with ``two_adapters`` there is none, and the
changes are added.

Reference: Bian, Wang, Zhang, Xu, "FedALT: federated fine-tuning through adaptive local
training with rest-of-world LoRA", AAAI 2026, arXiv:2503.11880.
"""

from typing import Annotated, Any, NamedTuple

import jax

from fedblend import trees
from fedblend.algorithms.partial import partial
from fedblend.checks import Number
from fedblend.core import Algorithm, Loss, Needs, PyTree, Up, Wire, start_with_params
from fedblend.errors import UserError
from fedblend.local import Work, descend
from fedblend.losses import objective
from fedblend.registry import STEP_BY_STEP, algorithm

PAIR = ("personal", "shared")


class RestClient(NamedTuple):
    """The state of a client: its adapter and weights, None where the others' are."""

    own: PyTree


def _is_pair(node: Any) -> bool:
    return isinstance(node, dict) and {*PAIR} <= node.keys()


def _each(function, *found: PyTree) -> PyTree:
    return jax.tree.map(function, *found, is_leaf=_is_pair)


def _move(pairs: PyTree, one: str, place: str) -> PyTree:
    """One adapter of each pair, in the place of one, and None in all others."""
    return _each(lambda pair: {**dict.fromkeys(pair), place: pair[one]}, pairs)


def own_adapter(loss: Loss, work: Work) -> Algorithm:
    """What a new client runs: steps on its own adapter, beside the mean of all."""
    return partial(loss, work, personal=lambda path: "shared" not in path.split("/"))


@algorithm(form="pairs", new_client=STEP_BY_STEP._replace(build=own_adapter))
def fedalt_lora(
    loss: Loss, work: Work, *, clients: Annotated[int, Number(least=2, whole=True)]
) -> Algorithm:
    """An adapter of each client's own, beside the frozen mean of all others' adapters.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``, of a model with ``gated_lora``
            adapters, or with ``two_adapters``.
        work: local work of a round, on the client's own adapter and its weights.
        clients: how many there are, 2 or more.
    """

    def enroll(params, shard, key):
        if not any(map(_is_pair, jax.tree.leaves(params, is_leaf=_is_pair))):
            allowed = "those of pairs of adapters, as fb.adapt.gated_lora makes them"
            raise UserError("fedalt_lora: params", params, allowed, "a model's")
        return (), RestClient(_each(lambda pair: {**pair, "shared": None}, params))

    def both(pairs, means):
        """The pairs with the shared adapters of others in both places."""
        return _each(
            lambda pair, mean: {**pair, **dict.fromkeys(PAIR, mean["shared"])},
            pairs,
            means,
        )

    def start(params, joins, central, key):
        first = both(params, _move(params, "personal", "shared"))
        return start_with_params(first, joins, central, key)

    def personal(down, client, shard, key):
        def rest(mean, own):
            return mean + (mean - own) / (clients - 1)

        def fill_shared(mean, pair):
            others = jax.tree.map(rest, mean["shared"], pair["personal"])
            return {**pair, "shared": others}

        return _each(fill_shared, down.shared, client.own)

    def client(down, client, shard, key):
        whole = personal(down, client, shard, key)

        def direction(here, batch):
            def own_loss(own):
                return objective(loss, trees.fill(own, whole), batch)

            return jax.grad(own_loss)(here)

        correction = _move(down.correction, "shared", "personal")
        given = {"work": work, "round": down.round, "correction": correction}
        reached, mean_gradient = descend(direction, client.own, shard, key, **given)
        change = trees.subtract(reached, client.own)
        sent = [_move(one, "personal", "shared") for one in (change, mean_gradient)]
        return Up(*sent), RestClient(reached)

    def server(aggregate, down, server, central, key):
        change = trees.scale(aggregate.participation, aggregate.mean.delta)
        means = trees.add_where_given(down.shared, change)
        return down._replace(shared=both(down.shared, means)), server

    def tell(down, request):
        shared, correction = (
            _move(one, "shared", "shared") for one in (down.shared, down.correction)
        )
        return down._replace(shared=shared, correction=correction)

    halves = (enroll, start, client, server, personal)
    needs = Needs(mean=True, memories=True, uniform=True, clients=clients)
    return Algorithm(
        *halves, wire=Wire(tell=tell), needs=needs._replace(weights="uniform")
    )
