# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Two sines, run: clients of two kinds, each with 50 points of its kind's sine.

Every split and seed is a data set of its own. They stand side by side as columns of
the same rows, and a replica of a sweep reads one column: the data sets of a range of
amplitudes and all alphas are one run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedblend as fb
from fedblend.batches import everything
from fedblend.core import Loss
from fedblend.data.dataset import Dataset
from fedblend.data.partition import federate_dataset
from fedblend.solvers import Solver
from fedblend_reproductions.datasets import two_sines

TOLERANCE = 1e-2
FIRST_STEP = 1e-3
GROWTH = 1.5
"""A step is at most so many times the one before; the first one is small."""


class Descent(NamedTuple):
    """The last parameters, gradient and step, the number of steps, and the norm."""

    params: Any
    gradient: Any
    step: jax.Array
    steps: jax.Array
    norm: jax.Array


def descent(scale: jax.Array | float = 1.0) -> optax.GradientTransformation:
    """Gradient descent until the gradient's norm over ``scale`` is small enough.

    The step is the shorter one of Barzilai and Borwein, "Two-point step size gradient
    methods", IMA Journal of Numerical Analysis, 1988: ``<s, y> / <y, y>`` of the last
    changes of the parameters and of the gradient. A line search would need losses, and
    the server receives gradients only.
    """

    def init(params):
        zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
        return Descent(params, fb.trees.zeros_like(params), zero, none, zero + jnp.inf)

    def update(updates, state, params=None):
        gradient = updates
        change = fb.trees.subtract(params, state.params)
        bend = fb.trees.subtract(gradient, state.gradient)
        products = jax.tree.map(jnp.vdot, change, bend)
        along = abs(jax.tree.reduce(jnp.add, products))
        secant = along / jnp.maximum(fb.trees.sum_squares(bend), 1e-30)
        longer = jnp.minimum(secant, GROWTH * state.step)
        step = jnp.where(state.steps == 0, FIRST_STEP / scale**2, longer)
        norm = jnp.sqrt(fb.trees.sum_squares(gradient)) / scale
        after = Descent(params, gradient, step, state.steps + 1, norm)
        moved = fb.trees.scale(-step, gradient), after
        resting = fb.trees.zeros_like(gradient), state._replace(norm=norm)
        change, state = fb.trees.select(norm > TOLERANCE, moved, resting)
        return change, state

    return optax.GradientTransformation(init, update)


RANGES = {"text": (0.1, 0.5), "code": (0.1, 5.0)}
"""Amplitudes, as the paper's text and as its authors' code have them."""


class Size(NamedTuple):
    """How much is run; ``firsts`` are the clients of the first kind.

    ``exact`` are the ranges in which x_i are found by L-BFGS too.
    """

    ranges: tuple[str, ...]
    exact: tuple[str, ...]
    clients: int
    firsts: tuple[int, ...]
    seeds: int
    test_points: int
    alphas: tuple[float, ...]
    rounds: int


ALPHAS = tuple(float(tenths) / 10 for tenths in range(11))
FULL = Size(("text", "code"), ("code",), 200, (30, 50, 70, 90), 5, 2000, ALPHAS, 8000)
QUICK = Size(("text",), (), 10, (3,), 2, 200, (0.0, 0.1, 0.5, 1.0), 100)
BLOCKS = 20
"""After each of so many blocks of rounds the run ends if all gradients are small."""


class Column(NamedTuple):
    """One data set."""

    range: str
    first: int
    seed: int

    def draw(self, size: Size) -> Dataset:
        """Its points."""
        return two_sines(
            clients=size.clients,
            first=self.first,
            test_points=size.test_points,
            amplitudes=RANGES[self.range],
            seed=self.seed,
        )


class Replica(NamedTuple):
    """What a replica of the sweep has of its own; ``models`` are x_i over clients."""

    alpha: Any
    column: Any
    models: Any


class Outcome(NamedTuple):
    """``errors[split, seed, alpha]`` on test points, gradient norms over alpha and
    steps likewise, and the gradient norms ``own_norms[split, seed, client]`` of x_i.
    """

    errors: np.ndarray
    norms: np.ndarray
    steps: np.ndarray
    own_norms: np.ndarray


def measured(size: Size, name: str, solver: Callable[[Loss], Solver]) -> Outcome:
    """All splits, seeds and alphas for one range of amplitudes."""
    columns = [
        Column(name, first, seed) for first in size.firsts for seed in range(size.seeds)
    ]
    drawn = [column.draw(size) for column in columns]
    federated_data = _side_by_side(drawn)
    model = fb.models.mlp(1, 1, hidden=(40, 40), activation="tanh")
    half = fb.losses.squared_error(model.apply)

    def loss_of(column):
        def loss(params, rows):
            picked = [jnp.take(part, column, axis=1)[:, None] for part in rows]
            return 2 * half(params, tuple(picked))

        return loss

    own = _own_models(model, loss_of, federated_data, columns, solver)
    alphas = len(size.alphas)
    replicas = Replica(
        jnp.tile(jnp.asarray(size.alphas, jnp.float32), len(columns)),
        jnp.repeat(jnp.arange(len(columns)), alphas),
        jax.tree.map(lambda leaf: jnp.repeat(leaf, alphas, axis=0), own.personal),
    )
    run = fb.simulate(
        lambda replica: _flix(loss_of(replica.column), replica),
        fb.trees.take(own.personal, (0, 0)),
        federated_data,
        jax.random.key(0),
        rounds=size.rounds,
        every=size.rounds // BLOCKS,
        over=replicas,
    )
    for _ in run:
        if (np.asarray(run.server.optimizer.norm) <= TOLERANCE).all():
            break
    errors = [
        _test_errors(model, size, run.shared, own.personal, place, data)
        for place, data in enumerate(drawn)
    ]
    grid = (len(size.firsts), size.seeds, alphas)
    return Outcome(
        np.reshape(errors, grid),
        np.reshape(run.server.optimizer.norm, grid),
        np.reshape(run.server.optimizer.steps, grid),
        np.asarray(own.norm).reshape(*grid[:2], size.clients),
    )


def _side_by_side(drawn: list[Dataset]) -> fb.FederatedData:
    """The training points, a column for each data set."""
    parts = zip(*(data.rows for data in drawn), strict=True)
    inputs, targets = (np.concatenate(part, axis=1) for part in parts)
    stacked = drawn[0]._replace(rows=(inputs, targets), test_rows=None)
    return federate_dataset(stacked, fb.partition.by_key(stacked.keys))


def by_descent(steps: int) -> Callable[[Loss], Solver]:
    """x_i by the same descent as the shared model."""

    def solver(loss):
        gradient = fb.losses.gradient(loss)

        def solve(params, shard, key):
            here, _ = fb.descend(
                gradient,
                params,
                shard,
                key,
                work=fb.Work(optimizer=descent(), steps=steps, batch_size=None),
            )
            left = fb.trees.sum_squares(gradient(here, everything(shard)))
            return here, jnp.sqrt(left)

        return solve

    return solver


def by_lbfgs(steps: int) -> Callable[[Loss], Solver]:
    """x_i by L-BFGS with a line search, to the same norm of the gradient."""
    return lambda loss: fb.solvers.lbfgs(loss, tolerance=TOLERANCE, most=steps)


def _own_models(model, loss_of, federated_data, columns, solver) -> Any:
    """x_i of all clients in all columns; those of a seed start at the same point."""

    def build(replica):
        loss = loss_of(replica.column)
        solve = solver(loss)

        def from_start(params, shard, key):
            del params
            return solve(replica.models, shard, key)

        return fb.flix(loss, _solver(1.0), alpha=0.0, local=from_start)

    seeds = jnp.asarray([column.seed for column in columns])
    starts = jax.vmap(lambda seed: model.init(jax.random.key(seed)))(seeds)
    replicas = Replica(jnp.zeros(len(columns)), jnp.arange(len(columns)), starts)
    run = fb.simulate(
        build,
        fb.trees.take(starts, 0),
        federated_data,
        jax.random.key(0),
        rounds=0,
        over=replicas,
    )
    states = run.complete().client_states()
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), states)


def _solver(scale):
    return lambda loss: fb.algorithms.fedopt(
        loss, fb.Work(1.0, steps=1, batch_size=None), descent(scale)
    )


def _flix(loss, replica: Replica) -> fb.Algorithm:
    scale = jnp.maximum(replica.alpha, 1e-6)  # alpha 0 has no gradient at all
    local = fb.solvers.given(replica.models)
    return fb.flix(loss, _solver(scale), alpha=replica.alpha, local=local)


def _test_errors(model, size: Size, shared, personal, place: int, data: Dataset):
    """Mean squared errors of one data set, a mean over clients for every alpha."""
    assert data.test_rows is not None
    per_client = (size.clients, size.test_points, 1)
    inputs, targets = (jnp.reshape(part, per_client) for part in data.test_rows)
    measure = fb.metrics.mean_squared_error(model.apply)
    alphas = jnp.asarray(size.alphas, jnp.float32)
    first = place * len(alphas)
    mine = fb.trees.take(shared, slice(first, first + len(alphas)))

    def error(alpha, ours, own, points):
        return measure(fb.mixing.parameters(alpha, ours, own), fb.Batch(points))

    every_client = jax.vmap(error, in_axes=(None, None, 0, 0))
    every_alpha = jax.vmap(every_client, in_axes=(0, 0, None, None))
    own = fb.trees.take(personal, place)
    return np.asarray(every_alpha(alphas, mine, own, (inputs, targets))).mean(axis=1)
