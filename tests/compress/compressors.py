# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every compressor, for tests that hold for all of them, and draws from them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import compress
from fedblend.core import Shard

DIM = 12
K_BY_CLIENT = np.array([3, 12, 1])

UNBIASED = {
    "identity": compress.identity(),
    "rand_k, shared": compress.rand_k(5),
    "rand_k, seed": compress.rand_k(5, places="seed"),
    "rand_k, sent": compress.rand_k(5, places="sent"),
    "rand_k, one entry": compress.rand_k(1),
    "rand_k by client": compress.rand_k(K_BY_CLIENT),
    "rand_k by client, sent": compress.rand_k(K_BY_CLIENT, places="sent"),
    "dithering, 1 level": compress.dithering(1),
    "dithering, 5 levels": compress.dithering(5),
    "natural": compress.natural(),
    "int8": compress.int8(),
}
CONTRACTIVE = {
    "identity": compress.identity(),
    "top_k": compress.top_k(4),
    "top_k by client": compress.top_k(K_BY_CLIENT),
    "sign": compress.sign(),
    "natural": compress.natural(),
    "dithering, 5 levels": compress.dithering(5),
    "int8": compress.int8(),
}
ALL = UNBIASED | CONTRACTIVE


def shard(client: int | jax.Array) -> Shard:
    """A client without data."""
    zero = jnp.zeros((), jnp.int32)
    return Shard((), zero, zero, jnp.asarray(client, jnp.int32), 0)


def own(value, client: int = 0) -> float:
    """One client's entry of a constant."""
    return float(np.broadcast_to(value, 3)[client])


def sent_and_back(compressor, vector, seed=0, client=0):
    """What the receiver takes a vector for."""
    key = jax.random.key(seed)
    payload = compressor.compress(vector, key, shard(client))
    return compressor.decompress(payload, len(vector), key, jnp.int32(client))


@cache
def _drawn(compressor, dim: int, count: int):
    def one(vector, client, seed):
        return sent_and_back(compressor, vector, seed, client)

    several = jax.vmap(one, in_axes=(None, None, 0))
    return jax.jit(lambda vector, client: several(vector, client, jnp.arange(count)))


def draws(compressor, vector, count: int, client: int = 0) -> np.ndarray:
    """Independent results of compressing one vector."""
    drawn = _drawn(compressor, len(vector), count)(jnp.asarray(vector), client)
    return np.asarray(drawn, np.float64)
