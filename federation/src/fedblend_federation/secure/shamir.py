# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Shamir's secret sharing: so many shares tell a secret of 32 bytes, fewer nothing.

A secret is the value at 0 of a polynomial over a prime field whose other coefficients
are random; a share is its value at another place.

Reference: Shamir, "How to share a secret", Communications of the ACM 22(11), 1979.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from fedblend_federation.secure.masks import SecureError, random_bytes

PRIME = 2**256 + 297
"""The smallest prime above all secrets."""
SECRET_BYTES, SHARE_BYTES = 32, 33
_DRAW_BYTES = 48
"""Reduced modulo the prime, so many random bytes are uniform up to 2**-127."""


def split(
    secret: bytes, threshold: int, places: Iterable[int], seed: bytes
) -> dict[int, bytes]:
    """A share for each place; any ``threshold`` of them tell the secret.

    Args:
        secret: 32 bytes.
        threshold: how many shares tell the secret.
        places: positive, one for each who gets a share.
        seed: 32 random bytes that nobody else knows; the same seed, the same shares.
    """
    drawn = random_bytes(seed, _DRAW_BYTES * (threshold - 1))
    coefficients = [int.from_bytes(secret, "big")] + [
        int.from_bytes(drawn[at : at + _DRAW_BYTES], "big") % PRIME
        for at in range(0, len(drawn), _DRAW_BYTES)
    ]
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares[place] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret that these shares tell, by their places.

    Raises:
        SecureError: there are too few shares, or they do not belong together.
    """
    if len(shares) < threshold:
        raise SecureError(f"{len(shares)} shares of a secret, {threshold} are needed")
    places = tuple(sorted(shares)[:threshold])
    value = sum(
        weight * int.from_bytes(shares[place], "big")
        for place, weight in zip(places, _weights(places), strict=True)
    )
    try:
        return (value % PRIME).to_bytes(SECRET_BYTES, "big")
    except OverflowError:
        raise SecureError("shares of a secret that do not belong together") from None


@lru_cache(maxsize=1024)
def _weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights: those of the values at these places in the value at 0."""
    found = []
    for own in places:
        above = below = 1
        for other in places:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
