# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The convolution agrees with XLA's, derivatives included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.models.convolution import convolution, tile_size
from fedblend.models.feedforward import pool


def direct(images, weight, *, stride=1, padding="VALID"):
    axes = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        images, weight, (stride, stride), padding, dimension_numbers=axes
    )


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [
        ((7, 6), 3, 1, "VALID"),
        ((7, 6), 3, 2, "SAME"),
        ((9, 8), 5, 1, "SAME"),
        ((8, 7), 4, 2, "VALID"),
        ((8, 7), 1, 2, "SAME"),
    ],
)
def test_values_and_derivatives_are_those_of_xla(size, kernel, stride, padding):
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        images = draws.normal(size=(2, *size, 3))
        weight = draws.normal(size=(kernel, kernel, 3, 4))

        def total(images, weight, way):
            found = way(images, weight, stride=stride, padding=padding)
            return jnp.sin(found).sum(), found

        both = jax.jit(jax.value_and_grad(total, (0, 1), True), static_argnums=2)
        (_, found), slopes = both(images, weight, convolution)
        (_, exact), true = both(images, weight, direct)
    assert found.shape == exact.shape
    # Sums of at most 75 products of numbers of order 1, in another order.
    for one, other in zip((found, *slopes), (exact, *true), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("size", "kernel", "padding", "tile"),
    [
        ((8, 6), 3, "VALID", 2),
        ((6, 8), 3, "SAME", 2),
        ((8, 12), 5, "VALID", 4),
        ((6, 8), 5, "VALID", 2),
        ((7, 8), 3, "VALID", 1),
    ],
)
def test_tiles_have_the_values_and_derivatives_of_xla(size, kernel, padding, tile):
    edge = 0 if padding == "SAME" else kernel - 1
    assert tile_size(kernel, [side - edge for side in size], outputs=4) == tile
    test_values_and_derivatives_are_those_of_xla(size, kernel, 1, padding)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_tiles_have_second_derivatives():
    draws = np.random.default_rng(0)
    with jax.enable_x64(True):
        images = jnp.asarray(draws.normal(size=(1, 4, 4, 2)))
        weight = jnp.asarray(draws.normal(size=(3, 3, 2, 3)))

        def curved(way):
            def total(weight):
                return jnp.sin(way(images, weight)).sum()

            return jax.jvp(jax.grad(total), (weight,), (weight,))[1]

        # Sums of at most 72 products of numbers of order 1, in another order.
        np.testing.assert_allclose(curved(convolution), curved(direct), atol=1e-12)


def test_tiles_are_large_where_outputs_are_few(monkeypatch):
    assert tile_size(5, (28, 28), 6) == 1  # a CPU does not wait for its memory so much
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert tile_size(5, (28, 28), 6) == 4
    assert tile_size(5, (28, 28), 64) == 2
    assert tile_size(3, (32, 32), 64) == 2
    assert tile_size(3, (8, 8), 256) == 1
    assert tile_size(1, (8, 8), 4) == 1


def test_entries_that_are_equally_large_share_the_derivative_of_pooling():
    image = jnp.array([[1.0, 3.0], [3.0, 2.0]])[None, :, :, None]
    slope = jax.grad(lambda image: pool(image).sum())(image)
    np.testing.assert_array_equal(slope[0, :, :, 0], [[0, 0.5], [0.5, 0]])
