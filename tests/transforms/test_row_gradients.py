# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of single rows, against those that autodiff makes of one row at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.transforms.row_gradients import row_gradient, sum_squares, sum_weighted

ROWS = 6
RNG = np.random.default_rng(0)
IMAGES = jnp.asarray(RNG.normal(size=(ROWS, 8, 8, 1)), jnp.float32)
CLASSES = jnp.asarray(RNG.integers(0, 10, ROWS))


def built(name: str):
    model = fb.models.build(name, (8, 8, 1), 10)
    return fb.losses.cross_entropy(model.apply), model.init(jax.random.key(0))


def used_twice(params, rows):
    hidden = jnp.tanh(rows[0].reshape(len(rows[1]), -1) @ params["in"])
    return jnp.square(hidden @ params["both"] @ params["both"]).sum(axis=1)


def one_place(params, rows):
    """Weights that see rows, or part of them, and weights in another type."""
    seen = rows[0].reshape(len(rows[1]), 8, 8) @ params["several"]
    seen = seen.sum(axis=1).astype(jnp.float16) @ params["half"]
    return jnp.square(seen.astype(jnp.float32) @ params["out"].T).sum(axis=1)


def convolution(params, rows):
    sizes = ("NHWC", "HWIO", "NHWC")
    seen = jax.lax.conv_general_dilated(
        rows[0], params["kernel"], (1, 1), "VALID", dimension_numbers=sizes
    )
    return jnp.square(seen.reshape(len(seen), -1) @ params["out"]).sum(axis=1)


def drawn(dtype=jnp.float32, **shapes):
    return {
        name: jnp.asarray(RNG.normal(size=shape), dtype)
        for name, shape in shapes.items()
    }


HALF = drawn(jnp.float16, half=(4, 3))
CASES = {
    "softmax": (*built("softmax"), 1),
    "mlp": (*built("mlp"), 3),
    "convolution": (convolution, drawn(kernel=(3, 3, 1, 2), out=(72, 1)), 1),
    "used twice": (used_twice, drawn(**{"in": (64, 5), "both": (5, 5)}), 1),
    "several rows": (one_place, drawn(several=(8, 4), out=(2, 3)) | HALF, 2),
}
"""Loss, parameters, and how many of them are weights of layers that see one vector."""


@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_are_those_of_single_rows(name):
    loss, params, dense = CASES[name]

    @jax.jit
    def ours(weights):
        found = jax.vmap(partial(row_gradient, loss, params))((IMAGES, CLASSES))
        assert len(found.factors) == dense
        return jax.vmap(sum_squares)(found), sum_weighted(found, weights, params)

    @jax.jit
    def slope(image, label):
        def loss_of(here):
            return loss(here, (image[None], label[None]))[0]

        return jax.grad(loss_of)(params)

    rows = zip(np.asarray(IMAGES), np.asarray(CLASSES), strict=True)
    each = [jax.tree.map(np.float64, jax.tree.leaves(slope(*row))) for row in rows]
    weights = np.float32(RNG.uniform(size=ROWS))
    norms, total = ours(weights)
    near = 2e-2 if "half" in params else 1e-4
    expected = [sum(np.square(leaf).sum() for leaf in one) for one in each]
    np.testing.assert_allclose(norms, expected, rtol=near)
    for leaf, *parts in zip(jax.tree.leaves(total), *each, strict=True):
        wanted = np.tensordot(weights, np.stack(parts), 1)
        size = np.abs(wanted).max()
        np.testing.assert_allclose(leaf, wanted, rtol=0, atol=near * size)


def test_rows_of_weight_zero_may_have_any_gradient():
    loss, params = built("mlp")
    images = IMAGES.at[2].set(jnp.nan)
    found = jax.vmap(partial(row_gradient, loss, params))((images, CLASSES))
    norms = jax.vmap(sum_squares)(found)
    np.testing.assert_array_equal(jnp.isnan(norms), np.arange(ROWS) == 2)
    total = sum_weighted(found, jnp.isfinite(norms).astype(jnp.float32), params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(total))
