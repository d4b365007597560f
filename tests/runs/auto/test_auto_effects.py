# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Coefficients and their errors, against closed forms and against JAX's Hessian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.data.dataset import generator
from fedblend.runs.auto.linear import PooledRows, coefficients, hierarchical_models

CLIENTS, WIDTH = 3, 4


def rows_of(kind: str) -> PooledRows:
    draw = generator(0, f"coefficients of {kind}")
    counts = np.array([30, 40, 50])
    inputs = np.hstack([np.ones((120, 1)), draw.normal(size=(120, WIDTH - 1))])
    scores = inputs @ draw.normal(size=WIDTH) + np.repeat(draw.normal(size=3), counts)
    targets = scores + draw.normal(size=120)
    return PooledRows(
        inputs, (targets > 0).astype(int) if kind == "binary" else targets, counts
    )


def test_errors_are_those_of_ordinary_least_squares():
    rows = rows_of("regression")
    found = coefficients("regression", rows, 1)
    inputs, targets = rows.inputs, rows.targets
    model, *_ = np.linalg.lstsq(inputs, targets, rcond=None)
    noise = ((targets - inputs @ model) ** 2).sum() / (len(targets) - WIDTH)
    errors = np.sqrt(noise * np.diag(np.linalg.inv(inputs.T @ inputs)))
    np.testing.assert_allclose(found.shared, model, rtol=1e-6)
    np.testing.assert_allclose(found.shared_error, errors, rtol=1e-6)
    assert found.freedom == pytest.approx(len(targets) - WIDTH)
    assert not found.own.any() and not found.own_error.any()


@pytest.mark.parametrize("kind", ["binary", "regression"])
@pytest.mark.parametrize("share", [True, False])
def test_errors_are_those_of_the_hessian(kind, share):
    rows, ridge = rows_of(kind), 0.01 * share
    options = {"level": 0.7, "slopes": 0.2, "ridge": ridge, "share": share}
    found = coefficients(kind, rows, 1, **options)
    models = hierarchical_models(kind, rows, 1, **options)
    np.testing.assert_allclose(found.shared + found.own, models, atol=1e-7)
    scale = np.sqrt([0.7, 0.2, 0.2, 0.2])
    owner = np.repeat(np.arange(CLIENTS), rows.counts)

    def objective(here: jax.Array) -> jax.Array:
        shared = here[:WIDTH] * share
        u = here[WIDTH:].reshape(CLIENTS, WIDTH)
        model = shared[None] + scale[None] * u
        scores = (rows.inputs * model[owner]).sum(axis=1)
        each = 0.5 * (scores - rows.targets) ** 2
        if kind == "binary":
            each = jnp.logaddexp(0, scores) - rows.targets * scores
        slopes = jnp.square(shared[1:]).sum()
        return each.sum() + 0.5 * jnp.square(u).sum() + 0.5 * 120 * ridge * slopes

    here = np.concatenate([found.shared, (found.own / scale).ravel()])
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.grad(objective)(here), 0.0, atol=1e-6)
        hessian = np.asarray(jax.hessian(objective)(here))
    errors = np.sqrt(np.diag(np.linalg.pinv(hessian, hermitian=True)))
    if kind == "regression":
        gaps = (rows.inputs * models[owner]).sum(axis=1) - rows.targets
        errors *= np.sqrt((gaps**2).sum() / found.freedom)
    own = errors[WIDTH:].reshape(CLIENTS, WIDTH) * scale
    np.testing.assert_allclose(found.own_error, own, rtol=1e-6)
    np.testing.assert_allclose(found.shared_error, errors[:WIDTH], rtol=1e-6, atol=1e-9)
