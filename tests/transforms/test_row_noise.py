# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Noise for rows: clipping, the noise, what algorithms get, and what it adds up to."""

import dataclasses
from importlib import import_module
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

import example_arguments as examples
import fedblend as fb
import problems
from fedblend import trees
from fedblend.batches import rows_at
from fedblend.config.tables.adapt import ADAPTERS
from fedblend.errors import SettingError
from fedblend.losses import gradient
from fedblend.registry import ALGORITHMS
from fedblend.simulation import aggregators
from fedblend.theory.privacy import gaussian_epsilon, row_epsilon

module = import_module("fedblend.transforms.row_noise")
"""The name in the package is the function."""


def squares(params, rows):
    return 0.5 * jnp.square(rows @ params)


ROWS = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.5, 0.5], [0.0, 30.0]])
START = jnp.array([1.0, 1.0])


def clipped(clip: float, rows=ROWS) -> np.ndarray:
    """Clipped gradients row by row, in NumPy."""
    each = np.asarray(rows, float) * (np.asarray(rows, float) @ np.ones(2))[:, None]
    norms = np.linalg.norm(each, axis=1)
    return each * np.minimum(1, clip / norms)[:, None]


@pytest.mark.parametrize("numbers", [2, 4, 10**6])
def test_a_gradient_is_the_mean_of_clipped_ones(numbers, monkeypatch):
    monkeypatch.setattr(module, "MOST_NUMBERS", numbers)  # rows one by one, or at once
    found = gradient(fb.transforms.row_noise(squares, 2.0, 0.0))(START, fb.Batch(ROWS))
    np.testing.assert_allclose(found, clipped(2.0).mean(axis=0), rtol=1e-6)
    mask = jnp.array([True, False, True, False])
    found = gradient(fb.transforms.row_noise(squares, 2.0, 0.0))(
        START, fb.Batch(ROWS, mask)
    )
    np.testing.assert_allclose(found, clipped(2.0)[[0, 2]].mean(axis=0), rtol=1e-6)


def test_a_row_that_comes_twice_counts_once():
    number = jnp.asarray(0, jnp.int32)
    shard = fb.Shard(ROWS, number, number + 4, number, 4)
    batch = rows_at(shard, jnp.array([1, 1, 1, 2]))
    found = gradient(fb.transforms.row_noise(squares, 2.0, 0.0))(START, batch)
    np.testing.assert_allclose(found, clipped(2.0)[[1, 2]].sum(axis=0) / 4, rtol=1e-6)


def test_a_row_whose_gradient_is_not_finite_moves_nothing():
    for wrong in (np.nan, np.inf, 1e30):
        rows = ROWS.at[1].set(wrong)
        found = gradient(fb.transforms.row_noise(squares, 2.0, 0.0))(
            START, fb.Batch(rows)
        )
        rest = clipped(2.0)[[0, 2, 3]].sum(axis=0)
        assert np.linalg.norm(4 * np.asarray(found) - rest) <= 2.0 + 1e-5


def test_the_noise_is_as_large_as_stated_and_never_the_same():
    loss = fb.transforms.row_noise(squares, 2.0, 3.0, counts=True)
    step = jax.jit(lambda: gradient(loss)(START, fb.Batch(ROWS)))
    found = np.stack([step() for _ in range(400)]) - clipped(2.0).mean(axis=0)
    assert len(np.unique(found[:, 0])) > 300  # values are on a grid
    # Of 800 numbers a standard deviation is right to 2.5 %.
    assert abs(found.std() / (3.0 * 2.0 / 4) - 1) < 0.1
    assert loss.take_spent() == {1.0: 400}
    assert loss.take_spent() == {}


def expansion(loss):
    """Gradient and Hessian of the quadratic around ``START``."""
    local = loss.expand(START, fb.Batch(ROWS))
    return jax.grad(local)(START), jax.hessian(local)(START)


@pytest.mark.parametrize("numbers", [2, 10**6])
def test_a_hessian_is_clipped_together_with_the_gradient(numbers, monkeypatch):
    monkeypatch.setattr(module, "MOST_NUMBERS", numbers)
    found = expansion(fb.transforms.row_noise(squares, 20.0, 0.0))
    slope, curve = np.zeros(2), np.zeros((2, 2))
    for row in np.asarray(ROWS, float):
        own = row * row.sum(), np.outer(row, row)
        norm = np.sqrt((own[0] ** 2).sum() + (own[1] ** 2).sum())
        slope += min(1, 20 / norm) * own[0] / 4
        curve += min(1, 20 / norm) * own[1] / 4
    np.testing.assert_allclose(found[0], slope, rtol=1e-5)
    np.testing.assert_allclose(found[1], curve, rtol=1e-5)


@pytest.mark.parametrize(("clip", "noise"), [(1e4, 4e-5), (2.0, 30.0)])
def test_the_noise_of_a_hessian_is_symmetric_and_one_evaluation(clip, noise):
    """Off the diagonal it is the mean of two; after much noise nothing bends down."""
    loss = fb.transforms.row_noise(squares, clip, noise, counts=True)
    step = jax.jit(lambda: expansion(loss))
    found = [step() for _ in range(400)]
    slopes, curves = (np.stack(of) for of in zip(*found, strict=True))
    assert loss.take_spent() == {1.0: 400}
    assert abs(slopes.std(axis=0).mean() / (noise * clip / 4) - 1) < 0.1
    np.testing.assert_allclose(curves, curves.transpose(0, 2, 1), rtol=1e-4, atol=1e-4)
    if noise < 1:  # rows bend more than the noise: nothing was cut
        assert abs(curves[:, 0, 0].std() / 0.1 - 1) < 0.15
        assert abs(curves[:, 0, 1].std() / (0.1 / np.sqrt(2)) - 1) < 0.15
    assert np.linalg.eigvalsh(curves.astype(float)).min() > -1e-4


def test_single_losses_and_second_derivatives_are_refused():
    loss = fb.transforms.row_noise(squares, 1.0, 1.0)
    with pytest.raises(SettingError, match="hides the losses of rows"):
        loss(START, ROWS)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.hessian(lambda here: loss.objective(here, fb.Batch(ROWS)))(START)


def in_two_rounds(algorithm, params):
    """What a client of some rows sends, and what it keeps; compiled once for all."""

    @jax.jit
    def run(shard):
        key = jax.random.key(5)
        join, state = algorithm.enroll(params, shard, key)
        aggregate = aggregators.finish(aggregators.empty(join), 1.0)
        down, _ = trees.strongly_typed(algorithm.start(params, aggregate, None, key))
        sent = [join]
        for round in range(2):
            message = down._replace(round=jnp.asarray(round, jnp.int32))
            own = algorithm.wire.tell(message, algorithm.wire.ask(state, shard))
            own_key = jax.random.fold_in(key, round)
            up, state = algorithm.client(own, state, shard, own_key)
            sent.append(up._replace(mean_gradient=None, step_sum=None))
        return [leaf for leaf in jax.tree.leaves((sent, state)) if _is_number(leaf)]

    return run


def _is_number(leaf) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


COVERED = [
    name
    for name, entry in ALGORITHMS.items()
    if entry.reads == "gradients" and "features" not in entry.sends and not entry.form
]


@pytest.mark.parametrize("name", COVERED)
def test_nothing_but_gradients_of_rows_is_used(name):
    """Clipped to nothing, they leave no trace of the rows in what a client does."""
    problem = problems.classes()
    hidden = fb.transforms.row_noise(problem.loss, 1e-12, 0.0)
    work = fb.Work(0.1, steps=1 if name == "flix" else 2, batch_size=2)
    algorithm = examples.build(name, hidden, work, len(problems.COUNTS))
    shard, rng = problem.federated_data.train.shard(2), np.random.default_rng(0)

    def other(leaf):
        leaf = np.asarray(leaf)
        drawn = rng.normal(size=leaf.shape) if leaf.dtype.kind == "f" else leaf[::-1]
        return jnp.asarray(drawn, leaf.dtype)

    rows = jax.tree.map(other, shard.examples)
    changed = dataclasses.replace(shard, examples=rows)
    run = in_two_rounds(algorithm, problem.params)
    for one, after in zip(run(shard), run(changed), strict=True):
        np.testing.assert_allclose(one, after, rtol=0, atol=1e-9)


def test_algorithms_with_a_form_of_their_own_declare_what_else_they_use():
    """The others are covered; adapters are parameters like any others."""
    formed = [
        one for one in ALGORITHMS.values() if one.form and one.form not in ADAPTERS
    ]
    assert formed and all(one.reads != "gradients" for one in formed)


def test_epsilon_of_a_row_by_hand():
    """Sixty steps on all rows at noise 3 are one Gaussian mechanism."""
    assert row_epsilon({(3.0, 1.0): 60}, 1e-5) == gaussian_epsilon(60 / 9, 1e-5)
    assert row_epsilon({(0.0, 1.0): 1}, 1e-5) == inf
    drawn = float(binom.isf(0.5e-5, 1000, 0.01))
    assert 10 < drawn < 40  # far below the 1000 steps
    expected = gaussian_epsilon(drawn / 4, 0.5e-5)
    assert row_epsilon({(2.0, 0.01): 1000}, 1e-5) == pytest.approx(expected)
