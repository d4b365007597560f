# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys, boxes, masks and shared secrets of secure aggregation.

The library ``cryptography`` does the work: HKDF-SHA256 derives every key, and what it
is for is part of the derivation; ChaCha20-Poly1305 seals what one node sends another
through the server; the key stream of ChaCha20 is the mask.

Secrets of 32 bytes are shared by Shamir's scheme ("How to share a secret",
Communications of the ACM 22(11), 1979): a secret is the value at 0 of a polynomial over
a prime field whose other coefficients are random, and a share its value at another
place. A threshold of shares recovers the secret, fewer tell nothing.
"""

import os
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedblend.simulation.serialize import WireError

KEY_BYTES, NONCE_BYTES = 32, 12
OVERHEAD = NONCE_BYTES + 16
"""Bytes by which a box is longer than its content."""
_BLOCK = 1 << 16
"""Bytes of a key stream that are computed at a time: they stay in the cache."""
_ZEROS = bytes(_BLOCK)


class SecureError(WireError):
    """A step of the protocol that cannot be taken, and why: one line."""


def derive(secret: bytes, purpose: str, *about: bytes | int) -> bytes:
    """32 bytes that only those who have the secret know, for one purpose."""
    parts = [purpose.encode()] + [
        part if isinstance(part, bytes) else str(part).encode() for part in about
    ]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def seal(key: bytes, content: bytes) -> bytes:
    """A box that only those who have the key can open, or make."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, None)


def unseal(key: bytes, box: bytes) -> bytes:
    """The content of a box.

    Raises:
        SecureError: it was made with another key, or changed on its way.
    """
    try:
        opened = ChaCha20Poly1305(key).decrypt(
            box[:NONCE_BYTES], box[NONCE_BYTES:], None
        )
    except (InvalidTag, ValueError):
        raise SecureError("a box of another node does not open") from None
    return opened


def random_bytes(seed: bytes, count: int) -> bytes:
    """So many bytes of the key stream of a seed."""
    return Cipher(ChaCha20(seed, bytes(16)), None).encryptor().update(bytes(count))


def add_mask(total: np.ndarray, seed: bytes, sign: int) -> None:
    """Add the mask of a seed to whole numbers, or subtract it, modulo their range."""
    stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
    block = bytearray(_BLOCK)
    numbers = np.frombuffer(block, total.dtype)
    add = np.add if sign > 0 else np.subtract
    for start in range(0, total.size, numbers.size):
        some = total[start : start + numbers.size]
        stream.update_into(_ZEROS, block)
        add(some, numbers[: some.size], out=some)


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
