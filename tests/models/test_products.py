# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Products of another precision: what is rounded, and what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.models import mlp, set_products

PLAIN = mlp(6, 3, hidden=(8,))
PARAMS = PLAIN.init(jax.random.key(0))
ROWS = jax.random.normal(jax.random.key(1), (5, 6))


def slope(model):
    return jax.grad(lambda params: jnp.sin(model.apply(params, ROWS)).sum())(PARAMS)


@pytest.mark.slow
def test_bfloat16_rounds_the_model_and_keeps_its_parameters_and_gradients():
    low = set_products(PLAIN, "bfloat16")
    found, exact = low.apply(PARAMS, ROWS), PLAIN.apply(PARAMS, ROWS)
    assert found.dtype == exact.dtype
    # bfloat16 has 8 bits: 0.4 % each for weights and activations of two layers.
    assert 1e-5 < np.abs(found - exact).max() < 0.05
    for one, other in zip(
        *(jax.tree.leaves(slope(m)) for m in (low, PLAIN)), strict=True
    ):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, atol=0.2)
    assert low.features is not None and low.head is not None
    halves = low.head(PARAMS, low.features(PARAMS, ROWS))
    np.testing.assert_array_equal(halves, found)


@pytest.mark.parametrize(
    ("products", "word"), [("float32", "HIGHEST"), ("tf32", "HIGH")]
)
def test_products_are_compiled_with_the_precision_asked_for(products, word):
    model = set_products(PLAIN, products)
    text = str(jax.make_jaxpr(slope_of(model))(PARAMS))
    asked = [line for line in text.splitlines() if "precision=" in line]
    assert len(asked) >= 2
    assert all(f"Precision.{word})" in line or f"{word}," in line for line in asked)


def slope_of(model):
    return jax.grad(lambda params: model.apply(params, ROWS).sum())
