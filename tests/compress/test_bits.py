# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Bits counted are eight times the bytes sent, which are enough to decode."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressors import ALL, K_BY_CLIENT, shard
from hypothesis import given, settings
from hypothesis import strategies as st

from fedblend import compress
from fedblend.compress import decode, encode
from fedblend.core import Ragged, ragged_bits, static_bits
from fedblend.simulation.serialize import (
    WireError,
    complete_message,
    pack,
    traveling,
    unpack,
)

LAYOUTS = (
    {"one": (3, 4)},
    {"weight": (2, 5), "bias": (5,), "scale": ()},
    {"a": (7,), "b": {"c": (1, 3, 3), "d": (13,)}},
)


@cache
def programs(name: str):
    """Compressing and decompressing, compiled."""

    def send(tree, key, client):
        return encode(ALL[name], tree, key, shard(client), "compress")

    def receive(message, key, client):
        return decode(ALL[name], message, key, "compress", client)

    return jax.jit(send), jax.jit(receive)


@st.composite
def trees(draw):
    """Leaves of one of the layouts, all of one precision."""
    layout = draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), dtype),
        layout,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def payload_bytes(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def same(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(trees(), st.integers(0, 2))
def test_bits_are_those_of_the_packed_payload(name, tree, client):
    key = jax.random.key(client)
    send, receive = programs(name)
    message = send(tree, key, client)
    data = pack(traveling(message))
    sent = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(traveling(message)))
    ragged = ragged_bits(message)
    counted = static_bits(message) + (0 if ragged is None else int(ragged))
    assert counted == 8 * sent == 8 * payload_bytes(data)

    back = complete_message(unpack(data)[0], jax.eval_shape(lambda: message))
    assert jax.tree.structure(back) == jax.tree.structure(message)
    same(receive(back, key, client), receive(message, key, client))


def test_shared_places_are_drawn_again_from_the_senders_key_only():
    tree, compressor = {"x": jnp.arange(1.0, 13)}, compress.rand_k(3)
    key = jax.random.key(4)
    message = encode(compressor, tree, key, shard(0), "diana")
    arrays, _ = unpack(pack(traveling(message)))
    assert [array.shape for array in arrays.values()] == [(3,)]
    mine, other, named = (
        decode(
            compressor, complete_message(arrays, message), jax.random.key(seed), purpose
        )
        for seed, purpose in ((4, "diana"), (5, "diana"), (4, "ef21"))
    )
    same(mine, decode(compressor, message, key, "diana"))
    for wrong in (other, named):
        assert not np.array_equal(wrong["x"], mine["x"])


def test_a_ragged_leaf_that_is_too_long_or_missing_is_refused():
    message = Ragged(jnp.arange(4), jnp.asarray(2, jnp.int32))
    np.testing.assert_array_equal(traveling(message), [0, 1])
    back = complete_message({"value": np.arange(3, dtype=np.int32)}, message)
    np.testing.assert_array_equal(back.buffer, [0, 1, 2, 0])
    assert back.used == 3
    for wrong in (np.arange(5, dtype=np.int32), np.arange(2.0), np.int32(1)):
        with pytest.raises(WireError, match="expected"):
            complete_message({"value": np.asarray(wrong)}, message)
    with pytest.raises(WireError, match="missing"):
        complete_message({}, message)


def test_a_clients_own_k_is_what_travels():
    compressor = compress.rand_k(K_BY_CLIENT)
    for client, own in enumerate(K_BY_CLIENT):
        message = encode(
            compressor, jnp.ones(12), jax.random.key(0), shard(client), "ef21"
        )
        (values,) = jax.tree.leaves(traveling(message))
        assert len(values) == own
