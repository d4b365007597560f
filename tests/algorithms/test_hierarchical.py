# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The hierarchical model: its rounds end where NumPy's solution is, and its limits."""

import jax
import numpy as np
import optax
import pytest

import fedblend as fb
from fedblend.errors import UserError
from fedblend.runs.auto.linear import PooledRows, hierarchical_models

COUNTS = np.array([30, 12, 45, 8, 21])
WORK = fb.Work(1.0, steps=8, batch_size=None)
LOSSES = {
    "regression": fb.losses.squared_error,
    "binary": fb.losses.logistic,
    "classes": fb.losses.cross_entropy,
}


def federation(kind):
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(COUNTS)), COUNTS)
    inputs = draw.normal(size=(len(owner), 3)).astype(np.float32)
    scores = inputs @ draw.normal(size=(3, 3)) + draw.normal(size=(5, 3))[owner]
    if kind == "regression":
        targets = (scores[:, 0] + draw.normal(size=len(owner))).astype(np.float32)
    elif kind == "binary":
        targets = (scores[:, 0] + draw.logistic(size=len(owner)) > 0).astype(np.int32)
    else:
        targets = (scores + draw.gumbel(size=scores.shape)).argmax(1).astype(np.int32)
    parts = [np.flatnonzero(owner == client) for client in range(len(COUNTS))]
    return fb.federate((inputs, targets), parts)


def models(kind, rounds, work=WORK, **options):
    data = federation(kind)
    outputs = 3 if kind == "classes" else 1
    model = fb.models.build("softmax", (3,), outputs)
    algorithm = fb.algorithms.hierarchical(LOSSES[kind](model.apply), work, **options)
    run = fb.simulate(algorithm, model.init, data, jax.random.key(0), rounds=rounds)
    found = run.complete().personal_models(range(5))
    vectors = [np.column_stack([one.bias, one.weight]).ravel() for one in found]
    expected = hierarchical_models(kind, PooledRows.of(data.train), outputs, **options)
    return run, np.stack(vectors), expected


@pytest.mark.parametrize(
    ("kind", "rounds", "options"),
    [
        ("regression", 1, {"level": 1.0, "slopes": 0.1, "ridge": 0.01}),
        ("binary", 8, {"level": 0.5, "slopes": 0.2, "ridge": 0.01}),
        pytest.param(
            *("classes", 8, {"level": 0.5, "slopes": 0.2, "ridge": 0.01}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rounds_end_at_the_solution(kind, rounds, options):
    """One round for squared errors; NumPy has all variables in one place.

    A message has the gradient, and half of the Hessian.
    """
    run, found, expected = models(kind, rounds, **options)
    if kind == "regression":
        assert set(run.bits().up) == {32 * (4 * 7 // 2)}
    if kind == "classes":  # the same number may be added to all classes
        found, expected = (
            one.reshape(5, 3, 4) - one.reshape(5, 3, 4).mean(axis=1, keepdims=True)
            for one in (found, expected)
        )
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_without_variance_it_is_one_model_for_all():
    _, found, expected = models("regression", 1, level=0.0, ridge=0.02)
    np.testing.assert_allclose(found, np.tile(found[0], (5, 1)), atol=1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_alone_nothing_travels():
    run, found, expected = models("regression", 1, level=9.0, slopes=0.3, share=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not run.bits().up.any() and not run.bits().down.any()


def test_it_takes_the_length_of_a_step_and_no_optimizer():
    with pytest.raises(UserError, match="length of the server's Newton step"):
        fb.algorithms.hierarchical(lambda p, r: r, fb.Work(optax.adam(0.1), 1, None))
