# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys, boxes and masks of secure aggregation, all by ``cryptography``.

HKDF-SHA256 derives every key, and what it is for is part of the derivation.
ChaCha20-Poly1305 seals what one node sends another through the server. The key stream
of ChaCha20 is the mask.
"""

import os

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedblend.simulation.io.serialize import WireError

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
