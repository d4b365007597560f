# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Fixed point: sums fit, errors are bounded as stated."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from fedblend_federation.secure.flatten import FixedPoint, coarse


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clients", [1, 3, 8, 200])
@pytest.mark.parametrize("clip", [0.3, 8.0, 65536.0])
def test_the_largest_sum_fits_and_twice_as_large_would_not(bits, clients, clip):
    fixed = FixedPoint(bits, clip, clients)
    for sign in (1, -1):
        one = fixed.encode(np.array([sign * 1e30]), 1.0)
        total = one * np.asarray(clients, fixed.dtype)
        # float64 has 53 bits, with which a sum of 63 bits is decoded.
        np.testing.assert_allclose(fixed.decode(total), sign * clients * clip, 1e-6)
    most = clients * Fraction(clip) * 2**fixed.fraction_bits
    assert most < 2 ** (bits - 1) <= 2 * most + 2


@pytest.mark.parametrize("bits", [32, 64])
def test_sums_are_as_exact_as_stated(bits):
    """Against exact fractions; float64 adds 2**-53 of each number."""
    rng, fixed = np.random.default_rng(0), FixedPoint(bits, 8.0, 7)
    values = rng.normal(size=(7, 200)).astype(np.float32) * 4
    weights = rng.uniform(0, 1, 7)
    encoded = [fixed.encode(v, w) for v, w in zip(values, weights, strict=True)]
    total = np.sum(encoded, axis=0, dtype=fixed.dtype)
    for at, found in enumerate(fixed.decode(total)):
        exact = sum(
            max(min(Fraction(float(v)) * Fraction(float(w)), 8), -8)
            for v, w in zip(values[:, at], weights, strict=True)
        )
        assert abs(Fraction(found) - exact) <= fixed.error + 60 * 2.0**-53


def test_what_is_clipped_is_counted():
    fixed = FixedPoint(64, 1.0, 2)
    values = np.array([0.5, -1.0, 1.5, -3.0])
    assert (
        fixed.count_clipped(values, 1.0) == 2 and fixed.count_clipped(values, 0.5) == 1
    )
    assert fixed.count_clipped(np.array([np.nan, np.inf, 0.0]), 1.0) == 2
    np.testing.assert_array_equal(
        fixed.decode(fixed.encode(np.array([3.0, -0.5]), 0.5)), [1.0, -0.25]
    )


@pytest.mark.parametrize(("size", "most"), [(1e6, 6), (0.5, 10)])
def test_known_weights_tell_no_signs(size, most):
    """Of five clients, four of which have 33 to 64 rows; exact weights told all 32."""
    fixed, rows = FixedPoint(64, 1.0, 5), np.array([40.0, 37.0, 53.0, 61.0, 29.0])
    weights = coarse(rows) / coarse(rows).max()
    sums = set()
    for signs in product((-1.0, 1.0), repeat=5):
        encoded = [
            fixed.encode(np.array([sign * size]), weight)
            for sign, weight in zip(signs, weights, strict=True)
        ]
        sums.add(int(np.sum(encoded, dtype=fixed.dtype)))
    assert len(sums) == most
