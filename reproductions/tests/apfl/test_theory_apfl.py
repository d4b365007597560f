# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL's rates and weights, by hand from the statements of its theorems."""

import numpy as np
import pytest

from fedblend.theory import Smoothness
from fedblend_reproductions.apfl import theory as apfl

STIFF = Smoothness(np.array([6.0, 2.0]), np.array([3.0, 0.5]), exact=True)
"""L = 6, mu = 1/2, kappa = 12."""


def test_the_rate_for_small_alpha():
    decay = apfl.small_alpha(STIFF, steps=10)
    assert decay.shift == 128 * 12
    assert decay(0) == 32 / (1 + 1536)  # the first step is t = 1
    assert decay(63) == 0.02


def test_the_rate_for_any_alpha():
    decay = apfl.any_alpha(STIFF, steps=10)
    assert decay.shift == 64 * 12
    assert decay(31) == 16 / 800


def test_long_rounds_shift_the_rate():
    assert apfl.small_alpha(STIFF, steps=5000).shift == 5000


def test_the_largest_alpha():
    assert np.isclose(apfl.largest_alpha(STIFF), 1 / (4 * 6**0.5 * 12))
    strong = Smoothness(np.array([16.0]), np.array([16.0]), exact=True)
    assert np.isclose(apfl.largest_alpha(strong), 1 / (4 * 4 * 6**0.5))


def test_the_rate_without_convexity():
    flat = Smoothness(np.array([2.0, 1.0]), np.zeros(2), exact=True)
    assert np.isclose(apfl.nonconvex(flat, horizon=5), 1 / 20)
    with pytest.raises(ValueError, match="horizon: 0 is not a whole number"):
        apfl.nonconvex(flat, horizon=0)
    with pytest.raises(ValueError, match=r"convex: 0\.0 is not above 0"):
        apfl.small_alpha(flat, steps=1)
