# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds of a few clients without compiling, for ``print``, ``pdb`` and norms."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.checks import ALGORITHM, WHOLE
from fedblend.core import Aggregate, Algorithm, Key, PyTree, Sender, Shard
from fedblend.data.federated import FEDERATED_DATA, FederatedData
from fedblend.errors import InputError, UserError, shorten
from fedblend.simulation import aggregators
from fedblend.simulation.rounds import answer
from fedblend.simulation.simulate import make_key
from fedblend.step_log import listen


class Step(NamedTuple):
    """A local step: its losses, in the order in which they were evaluated, and norms.

    ``gradients`` and ``updates`` are by the names of the parameters that are trained;
    updates are what the optimizer made of the gradients.
    """

    round: int
    client: str
    step: int
    losses: list[float]
    gradients: dict[str, float]
    updates: dict[str, float]


def debug(
    algorithm: Algorithm,
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData,
    key: Key | int,
    *,
    rounds: int = 1,
    clients: Sequence[int] = (0,),
    central: Shard | None = None,
) -> list[Step]:
    """Train a few clients without compiling, so that a loss may print, or call pdb.

    They take the steps that ``simulate`` takes with the same key, and are all who take
    part. What they do before the first round is compiled.

    Args:
        algorithm: see ``simulate``, as of what follows.
        params: the initial parameters, a model, or a function of a key.
        federated_data: the data of all clients.
        key: the seed.
        rounds: communication rounds.
        clients: their numbers.
        central: the server's own data, for methods that use some.

    Returns:
        The steps of all rounds and clients. A loss of ours has one loss per step.
    """
    ALGORITHM("algorithm", algorithm)
    FEDERATED_DATA("federated_data", federated_data)
    root, most = make_key(key), federated_data.clients
    if not len(clients) or not all(0 <= one < most for one in clients):
        raise UserError("clients", list(clients), f"some numbers from 0 to {most - 1}")
    params = getattr(params, "init", params)
    params = trees.strongly_typed(params(root) if callable(params) else params)
    steps, losses = list[Step](), list[float]()
    shards = [_on_device(federated_data.train.shard(one)) for one in clients]
    counts = jnp.asarray(federated_data.train.counts, float)
    weights = jnp.ones(most) if algorithm.needs.weights == "uniform" else counts
    everyone, now = float(weights.sum()), (0, "")

    def hear(what: str, value: PyTree) -> None:
        if what == "loss":
            losses.append(float(value))
            return
        number, *norms = value
        named = map(trees.leaves_by_path, norms)
        slopes, moves = (
            {name: float(one) for name, one in each.items()} for each in named
        )
        steps.append(Step(*now, int(number), losses.copy(), slopes, moves))
        losses.clear()

    @jax.jit
    def aggregate(ups: list[PyTree]) -> Aggregate:
        total = aggregators.empty(ups[0])
        for shard, up in zip(shards, ups, strict=True):
            one, weight = trees.stack([up]), weights[shard.id][None]
            total, _ = aggregators.add_to(total, one, weight, jnp.ones(1, bool))
        return aggregators.finish(total, everyone)

    try:
        with listen(hear):
            joined = [
                algorithm.enroll(params, one, keys.derive(root, "enroll", 0, one.id))
                for one in shards
            ]
            joins, states = map(list, zip(*joined, strict=True))
            key = keys.derive(root, "start")
            down, server = algorithm.start(params, aggregate(joins), central, key)
            steps.clear()
            for number in range(WHOLE("rounds", rounds)):
                ups = []
                for place, shard in enumerate(shards):
                    losses.clear()
                    now = number, federated_data.name(clients[place])
                    with jax.disable_jit():
                        _, up, states[place] = answer(
                            algorithm, root, down, shard, states[place]
                        )
                    key = keys.derive(root, "client", down.round, shard.id)
                    sender = Sender(shard.id, key, down)
                    ups.append(algorithm.wire.decode(up, sender))
                mean, key = aggregate(ups), keys.derive(root, "server", number)
                with jax.disable_jit():
                    down, server = algorithm.server(mean, down, server, central, key)
                down = down._replace(round=down.round + 1)
            jax.effects_barrier()
    except InputError as error:
        raise shorten(error) from error.__cause__
    return steps


def _on_device(shard: Shard) -> Shard:
    return dataclasses.replace(
        shard, examples=jax.tree.map(jnp.asarray, shard.examples)
    )
