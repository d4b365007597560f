# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Shares tell a secret, or nothing."""

import secrets
from itertools import combinations

import pytest

from fedblend_federation.secure import masks
from fedblend_federation.secure.masks import SecureError

SEED = bytes(range(32))


def is_prime(number: int) -> bool:
    """Miller and Rabin's test with 40 random bases: wrong with less than 2**-80."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1

    def passes(base: int) -> bool:
        value = pow(base, odd, number)
        if value in (1, number - 1):
            return True
        return any(pow(base, odd << n, number) == number - 1 for n in range(1, twos))

    return all(passes(2 + secrets.randbelow(number - 3)) for _ in range(40))


def test_the_field_is_one_and_holds_every_secret():
    assert is_prime(masks.PRIME) and masks.PRIME > 2**256
    assert not any(is_prime(n) for n in range(2**256 + 1, masks.PRIME, 2))


@pytest.mark.parametrize(("threshold", "holders"), [(1, 1), (2, 3), (4, 6), (6, 8)])
def test_every_subset_that_is_large_enough_tells_the_secret(threshold, holders):
    secret, places = secrets.token_bytes(32), [3 * n + 1 for n in range(holders)]
    shares = masks.split(secret, threshold, places, SEED)
    for size in range(threshold, holders + 1):
        for some in combinations(places, size):
            found = masks.combine({place: shares[place] for place in some}, threshold)
            assert found == secret


def test_fewer_shares_fit_every_secret():
    """One share fewer: for any other secret there is a polynomial through them."""
    places, secret = (1, 2, 5), bytes(32)
    shares = masks.split(secret, 4, (*places, 7), SEED)
    for other in (1, 2**200, 2**256 - 1):
        values = {0: other} | {p: int.from_bytes(shares[p], "big") for p in places}
        wanted = value_at(7, values).to_bytes(33, "big")
        forged = {**{p: shares[p] for p in places}, 7: wanted}
        assert masks.combine(forged, 4) == other.to_bytes(32, "big")


def value_at(place: int, values: dict[int, int]) -> int:
    """Lagrange's polynomial through these values, written out."""
    total = 0
    for own, value in values.items():
        term = value
        for other in values:
            if other != own:
                inverse = pow(own - other, masks.PRIME - 2, masks.PRIME)
                term = term * (place - other) * inverse % masks.PRIME
        total += term
    return total % masks.PRIME


def test_too_few_or_foreign_shares_are_one_line():
    shares = masks.split(bytes(32), 3, (1, 2, 3), SEED)
    with pytest.raises(SecureError, match="2 shares of a secret, 3 are needed"):
        masks.combine({1: shares[1], 2: shares[2]}, 3)
    # The largest value of the field is no secret.
    large = (masks.PRIME - 1).to_bytes(33, "big")
    with pytest.raises(SecureError, match="do not belong together"):
        masks.combine({1: large, 2: large}, 2)


def test_the_same_seed_makes_the_same_shares():
    first, again = (masks.split(bytes(32), 3, (1, 2), SEED) for _ in range(2))
    assert first == again
    assert masks.split(bytes(32), 3, (1, 2), SEED[::-1]) != first
