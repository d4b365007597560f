# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressors that send every entry in few bits: exact cases, and ends of the range."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressors import draws, sent_and_back, shard

from fedblend import compress
from fedblend.core import static_bits

TINY = 2.0**-126
POWERS = 2.0 ** np.arange(-126, 128)


INT8 = compress.int8()
dithering = cache(compress.dithering)


def bits(compressor, dim: int, dtype=jnp.float32) -> int:
    vector = jnp.ones(dim, dtype)
    return static_bits(compressor.compress(vector, jax.random.key(0), shard(0)))


def test_natural_compression_keeps_powers_of_two():
    vector = np.concatenate([POWERS, -POWERS, [0.0]]).astype(np.float32)
    for back in draws(compress.natural(), vector, 5):
        np.testing.assert_array_equal(back, vector)


def test_natural_compression_takes_one_of_the_two_nearest_powers():
    vector = jnp.asarray([1.1, -1.9, 3.0, 5e-30, 7e30], jnp.float32)
    below = 2.0 ** np.floor(np.log2(np.abs(vector)))
    drawn = np.abs(draws(compress.natural(), vector, 200))
    assert ((drawn == below) | (drawn == 2 * below)).all()


def test_natural_compression_at_the_ends_of_its_range():
    vector = np.array([TINY / 2, 0.9 * TINY, -TINY / 8, 3e38, -3.4e38], np.float32)
    drawn = draws(compress.natural(), vector, 50)
    assert (drawn == [0, 0, 0, 2.0**127, -(2.0**127)]).all()
    normal = np.array([TINY, 1.5 * TINY, 1.5 * 2.0**126], np.float32)
    mean = draws(compress.natural(), normal, 4000).mean(axis=0)
    np.testing.assert_allclose(mean, normal, rtol=0.03)


@pytest.mark.parametrize("levels", [1, 3, 255, 256])
@pytest.mark.parametrize("size", [-2.5, 1e-30, 3e30])
def test_dithering_of_one_entry_is_exact(levels, size):
    """All of the norm is in it; its square would leave the range of float32."""
    vector = jnp.zeros(9).at[4].set(size)
    for back in draws(dithering(levels), vector, 5):
        np.testing.assert_allclose(back, vector, rtol=3e-7, atol=0)


def test_dithering_rounds_to_multiples_of_the_norm():
    vector = jnp.asarray([3.0, -4, 0, 1, 2])
    unit = float(jnp.linalg.norm(vector)) / 7
    drawn = draws(compress.dithering(7), vector, 100) / unit
    np.testing.assert_allclose(drawn, np.round(drawn), atol=1e-5)
    assert (np.abs(drawn - np.asarray(vector) / unit) < 1 + 1e-5).all()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_int8_keeps_the_largest_and_its_even_steps(size):
    vector = jnp.asarray(np.array([127.0, -64, 1, 0, -127]) / 127 * size, jnp.float32)
    for back in draws(INT8, vector, 5):
        np.testing.assert_allclose(back, vector, rtol=1e-6)
        assert back[0] == vector[0] and back[4] == vector[4]


def test_sign_sends_the_mean_size():
    back = sent_and_back(compress.sign(), jnp.asarray([3.0, -1, 0, -4]))
    np.testing.assert_array_equal(back, [2, -2, 2, -2])


def test_what_they_cost():
    assert bits(compress.natural(), 100) == 904  # 900 bits fill 113 bytes
    assert bits(compress.sign(), 100) == 32 + 104
    assert bits(compress.int8(), 100) == 32 + 800
    assert bits(compress.dithering(1), 100) == 32 + 200
    assert bits(compress.dithering(4), 100) == 32 + 400
    assert bits(compress.identity(), 100, jnp.bfloat16) == 1600


@pytest.mark.parametrize("levels", [0, -3, 2**24 + 1])
def test_wrong_levels_are_one_clear_line(levels):
    with pytest.raises(ValueError, match=f"dithering: levels: {levels} is not a whole"):
        compress.dithering(levels)
