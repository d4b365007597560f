# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the rounds of a configuration cost, before they are run.

Bits are counted from the shapes of messages, as the runtime counts them. A message of
which a part may stay at home counts whole.
"""

from typing import Any, NamedTuple

import jax

from fedblend import trees
from fedblend.config import constants
from fedblend.config.build import Built
from fedblend.config.compress import compressed
from fedblend.config.config import Config
from fedblend.core import Algorithm, PyTree, Ragged, has_ragged, static_bits
from fedblend.simulation.simulate import simulate
from fedblend.theory.plan import DGD, Solver, Traffic


class Way(NamedTuple):
    """One way to spend rounds, and what they cost."""

    solver: Solver
    traffic: Traffic
    at_most: bool
    """The costs are bounds: clients whose messages are shorter count like the rest."""
    configured: bool
    """Whether this is what the configuration runs."""


def simulated(built: Built, algorithm: Algorithm, params: Any) -> Any:
    """A run of no rounds, with the first of the seeds."""
    key = built.key if built.key.ndim == 0 else built.key[0]
    return simulate(algorithm, params, built.federated_data, key, rounds=0)


def ways(config: Config, built: Built, params: PyTree) -> tuple[Way, ...]:
    """Gradient descent, and what the table ``[compress]`` makes of it.

    Args:
        config: what is to be run.
        built: the same without compression.
        params: parameters of its model, in any precision.
    """
    table, plain = config.compress, built.algorithm
    params = jax.tree.map(lambda leaf: leaf.astype(config.run.precision), params)
    clients, dim = built.federated_data.clients, trees.size(params)

    def run_of(start: str | None) -> Any:
        wanted = table and table.model_copy(update={"start": start})
        wrapped = compressed(wanted if start else None, plain, "flix", dim, clients)
        return simulated(built, wrapped, params)

    alone = run_of(None)
    first = Way(DGD, _traffic(alone, alone), False, table is None)
    if table is None:
        return (first,)
    usual, actual = run_of("zero"), run_of(table.start)
    at_most = has_ragged(usual.shapes.up)
    way = constants.solver(table, dim, clients)
    return (first, Way(way, _traffic(usual, actual), at_most, True))


def _traffic(usual: Any, actual: Any) -> Traffic:
    """What is sent in all, by the sizes of messages that the runtime counts.

    Args:
        usual: a run whose every round is like the later ones of the actual run.
        actual: the run, whose first round may take more.
    """
    clients, sizes = actual.federated_data.clients, actual.message_bits
    up = _whole_bits(usual.shapes.up)
    return Traffic(
        first=clients * (sizes.params + sizes.join + sizes.down),
        later=clients * (up + sizes.down),
        start=clients * (_whole_bits(actual.shapes.up) - up),
    )


def _whole_bits(message: PyTree) -> int:
    """Bits of a message of which every part travels whole."""

    def whole(leaf: Any) -> Any:
        return leaf.buffer if isinstance(leaf, Ragged) else leaf

    is_ragged = {"is_leaf": lambda leaf: isinstance(leaf, Ragged)}
    return static_bits(jax.tree.map(whole, message, **is_ragged))
