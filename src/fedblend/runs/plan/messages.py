# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of a plan's candidates, and what their messages cost, each way.

Bits are those that a run counts, plus the last broadcast, that of the model to deploy.
They come from the shapes of messages; one of variable length counts with its largest.
A mean of different masks is dense, and so is what the server sends.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend.config.build import Method, method
from fedblend.config.config import Config
from fedblend.core import PyTree, Ragged, has_ragged, static_bits
from fedblend.runs.plan.problem import Problem, stacked_models, started
from fedblend.simulation.run import Run
from fedblend.solvers import given
from fedblend.theory.plan import Traffic, spent_bits
from fedblend.trees import precision


class Ways(NamedTuple):
    """The bits of all clients, up and down."""

    up: Traffic
    down: Traffic
    at_most: bool
    """They are upper bounds, because messages vary in length."""
    clients: int

    @property
    def both(self) -> Traffic:
        """Both ways together."""
        return Traffic(*np.add(self.up, self.down).tolist())

    def spent(self, rounds: float) -> tuple[float, float]:
        """The bits of this many rounds, on average if not whole, up and down."""
        return spent_bits(rounds, self.up), spent_bits(rounds, self.down)


class _Given(NamedTuple):
    """In place of the table of a solver for x_i: models that are there already."""

    models: PyTree

    def make(self, facts: Any) -> Any:
        del facts
        return given(self.models)


def built_for(found: Problem, config: Config, rates: Any = None) -> Method:
    """What a configuration of the same data computes, from x_i that are known.

    Args:
        found: the problem.
        config: a candidate's, with alpha.
        rates: those of theory, if they are known.
    """
    models = stacked_models(found.personal, found.params, config.run.precision)
    options: Any = config.algorithm
    own = options.model_copy(update={"personal": _Given(models)})
    config = config.model_copy(update={"algorithm": own})
    clients = len(found.shape)
    known = found.smoothness
    return method(config, found.built.task, clients, clients, known, rates)


def run_of(found: Problem, config: Config, algorithm: Any, **options: Any) -> Run:
    """A run in the precision of the configuration, which has not begun."""
    width = config.run.precision
    params = jax.tree.map(lambda leaf: leaf.astype(width), found.params)
    return started(found.built, algorithm, params, **options)


def ways(found: Problem, config: Config) -> Ways:
    """What the messages of a configuration cost, from those that a run counts."""
    with precision(config.run.precision):
        actual = run_of(found, config, built_for(found, config).algorithm)
        usual, table = actual, config.compress
        if table is not None and table.how == "diana" and table.start != "zero":
            zero = {"compress": table.model_copy(update={"start": "zero"})}
            plain = config.model_copy(update=zero)
            usual = run_of(found, plain, built_for(found, plain).algorithm)
    clients, sizes = len(found.shape), actual.message_bits
    up, last = _whole_bits(usual.shapes.up), _last_bits(actual)
    more = _whole_bits(actual.shapes.up) - up
    # What a message has of variable length is the whole model, in the first round.
    first = _whole_bits(actual.shapes.message._replace(round=None)) - sizes.down
    return Ways(
        Traffic(clients * sizes.join, clients * up, clients * more),
        Traffic(clients * (sizes.params + last), clients * sizes.down, clients * first),
        has_ragged(usual.shapes.up),
        clients,
    )


def _last_bits(run: Run) -> int:
    """The bits of the last broadcast to one client."""
    return static_bits(run.shapes.last._replace(round=None))


def _whole_bits(message: PyTree) -> int:
    """Bits of a message whose parts of variable length have their largest size."""

    def whole(leaf: Any) -> Any:
        return leaf.buffer if isinstance(leaf, Ragged) else leaf

    is_ragged = {"is_leaf": lambda leaf: isinstance(leaf, Ragged)}
    return static_bits(jax.tree.map(whole, message, **is_ragged))
