# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Integers of any width come back out of their bytes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedblend.compress.compressor import pack, unpack, width_of


@partial(jax.jit, static_argnames="width")
def there_and_back(values, width):
    packed = pack(values, width)
    return packed, unpack(packed, len(values), width)


@st.composite
def numbers(draw):
    width = draw(st.integers(1, 31))
    values = st.integers(0, 2**width - 1)
    return width, draw(st.lists(values, min_size=4, max_size=4))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(numbers())
def test_numbers_come_back(case):
    width, values = case
    packed, back = there_and_back(jnp.asarray(values, jnp.uint32), width)
    assert packed.dtype == jnp.uint8
    assert len(packed) == -(-len(values) * width // 8)
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("width", range(1, 32))
def test_ends_of_every_width(width):
    values = np.array([0, 2**width - 1, 1, 2 ** (width - 1)], np.uint32)
    _, back = there_and_back(jnp.asarray(values), width)
    np.testing.assert_array_equal(back, values)


def test_bits_follow_each_other_without_gaps():
    packed = pack(jnp.asarray([0b101, 0b011, 0b110], jnp.uint32), 3)
    np.testing.assert_array_equal(packed, [0b10101111, 0b00000000])


@pytest.mark.parametrize(
    ("largest", "width"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (255, 8), (256, 9)]
)
def test_width_of_the_largest_number(largest, width):
    assert width_of(largest) == width
