# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted numbers, against scikit-learn."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scored_rows import ONE, apply, value_and_rows
from sklearn import metrics as sklearn_metrics

from fedblend import metrics
from fedblend.core import Batch

KNOWN = {
    "mse": sklearn_metrics.mean_squared_error,
    "mae": sklearn_metrics.mean_absolute_error,
    "rmse": lambda y, p: np.sqrt(sklearn_metrics.mean_squared_error(y, p)),
    "r2": sklearn_metrics.r2_score,
}


@cache
def built(name):
    return metrics.build(name, "regression", lambda params, rows: rows[0], apply)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 3)])
def test_they_equal_scikit_learn(name, shape):
    rng = np.random.default_rng(0)
    targets = rng.normal(3, 2, size=shape).astype(np.float32)
    values = (targets + rng.normal(size=shape)).astype(np.float32)
    mask = np.arange(30) < 24
    got, rows = value_and_rows(built(name), values, targets, mask)
    np.testing.assert_allclose(got, KNOWN[name](targets[mask], values[mask]), rtol=2e-5)
    np.testing.assert_allclose(rows.mean(), got, rtol=1e-5)


def test_a_single_output_may_be_a_column():
    targets = np.arange(5.0, dtype=np.float32)
    for name in KNOWN:
        flat, _ = value_and_rows(built(name), targets**2, targets, np.ones(5, bool))
        column = Batch((jnp.asarray(targets**2)[:, None], jnp.asarray(targets)))
        assert built(name)(ONE, column) == flat


@pytest.mark.parametrize("name", ["rmse", "r2"])
def test_what_rows_bring_has_the_error_of_the_jackknife(name):
    rng = np.random.default_rng(1)
    targets = rng.normal(size=150).astype(np.float32)
    values = (targets + rng.normal(size=150) / 2).astype(np.float32)
    value, rows = value_and_rows(built(name), values, targets, np.ones(150, bool))
    batch = (jnp.asarray(values), jnp.asarray(targets))
    masks = ~jnp.eye(150, dtype=bool)
    left = jax.jit(jax.vmap(lambda mask: built(name)(ONE, Batch(batch, mask))))(masks)
    pseudo = 150 * value - 149 * np.asarray(left)
    assert np.corrcoef(rows, pseudo)[0, 1] > 0.995
    np.testing.assert_allclose(rows.std(), pseudo.std(), rtol=0.05)


def test_nothing_is_explained_where_targets_do_not_vary():
    values, same = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    value, rows = value_and_rows(built("r2"), values, same, np.ones(4, bool))
    assert np.isnan(value) and np.isnan(rows).all()
    value, rows = value_and_rows(built("rmse"), same, same, np.ones(4, bool))
    assert value == 0 and (rows == 0).all()
    nobody = Batch((jnp.asarray(values), jnp.asarray(same)), jnp.zeros(4, bool))
    assert all(np.isnan(built(name)(ONE, nobody)) for name in KNOWN)


@pytest.mark.parametrize("target", [0.1, 7.7, 123.456])
def test_rounding_is_no_variance_of_targets(target):
    """The mean of ten times 0.1 is not 0.1 in float32."""
    for count in (3, 7, 10):
        same = np.full(count, target, np.float32)
        value, _ = value_and_rows(built("r2"), same + 1, same, np.ones(count, bool))
        assert np.isnan(value)
