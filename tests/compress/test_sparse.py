# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressors that send some entries: which, how many, and at what price."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressors import K_BY_CLIENT, sent_and_back, shard

from fedblend import compress
from fedblend.core import Ragged, ragged_bits, static_bits

VECTOR = jnp.asarray(np.random.default_rng(1).standard_normal(12), jnp.float32)


@pytest.mark.parametrize("places", ["shared", "seed", "sent"])
def test_rand_k_sends_k_entries_scaled(places):
    back = np.asarray(sent_and_back(compress.rand_k(5, places=places), VECTOR))
    chosen = back != 0
    assert chosen.sum() == 5
    np.testing.assert_allclose(back[chosen], VECTOR[chosen] * 12 / 5, rtol=1e-6)


def test_places_change_the_price_and_nothing_else():
    prices = {"shared": 5 * 32, "seed": 5 * 32 + 64, "sent": 5 * 32 + 24}
    backs = []
    for places, price in prices.items():
        compressor = compress.rand_k(5, places=places)
        payload = compressor.compress(VECTOR, jax.random.key(3), shard(0))
        assert static_bits(payload) == price  # 5 places of 4 bits fill 3 bytes
        backs.append(compressor.decompress(payload, 12, jax.random.key(3), None))
    np.testing.assert_array_equal(backs[0], backs[1])
    np.testing.assert_array_equal(backs[0], backs[2])


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize("places", ["shared", "sent"])
def test_rand_k_by_client(places, client):
    compressor = compress.rand_k(K_BY_CLIENT, places=places)
    payload = compressor.compress(VECTOR, jax.random.key(0), shard(client))
    back = np.asarray(compressor.decompress(payload, 12, jax.random.key(0), client))
    own = int(K_BY_CLIENT[client])
    chosen = back != 0
    assert chosen.sum() == own
    np.testing.assert_allclose(back[chosen], VECTOR[chosen] * 12 / own, rtol=1e-6)
    bits = 32 * own + (8 * -(-own * 4 // 8) if places == "sent" else 0)
    assert int(ragged_bits(payload)) == bits  # pyright: ignore
    assert static_bits(payload) == 0


@pytest.mark.parametrize("client", [0, 1, 2])
def test_top_k_by_client(client):
    own = int(K_BY_CLIENT[client])
    back = sent_and_back(compress.top_k(K_BY_CLIENT), VECTOR, client=client)
    np.testing.assert_array_equal(back, sent_and_back(compress.top_k(own), VECTOR))


def test_top_k_takes_the_largest_and_the_first_of_equal_ones():
    vector = jnp.asarray([1.0, -3, 2, -2, 2, 0, 3, -2])
    back = sent_and_back(compress.top_k(4), vector)
    np.testing.assert_array_equal(back, [0, -3, 2, -2, 0, 0, 3, 0])


@pytest.mark.parametrize("dim", [12, 10, 4, 3, 1])
def test_blocks_of_perm_k_make_up_the_vector(dim):
    """Also where clients do not divide entries, or outnumber them."""
    vector, clients = VECTOR[:dim], 4
    compressor = compress.perm_k(clients)(jax.random.key(5))
    backs = [sent_and_back(compressor, vector, client=i) for i in range(clients)]
    np.testing.assert_allclose(np.mean(backs, axis=0), vector, rtol=1e-6)
    assert (np.count_nonzero(backs, axis=0) == 1).all()


@pytest.mark.parametrize("dim", [12, 10, 3])
def test_each_block_of_perm_k_is_unbiased(dim):
    """Within 5 standard errors of 4000 permutations, for the last client too."""
    vector, clients, count = VECTOR[:dim], 4, 4000

    def one(seed, client):
        compressor = compress.perm_k(clients)(jax.random.key(seed))
        return sent_and_back(compressor, vector, client=client)

    seeds = jnp.arange(count)
    for client in (0, clients - 1):
        drawn = np.asarray(jax.vmap(partial(one, client=client))(seeds), float)
        error = drawn.std(axis=0, ddof=1) / np.sqrt(count)
        exact = np.asarray(vector, float)
        assert (np.abs(drawn.mean(axis=0) - exact) <= 5 * error).all()
        squares = ((drawn - exact) ** 2).sum(axis=1) / (exact**2).sum()
        spread = squares.std(ddof=1) / np.sqrt(count)
        assert abs(squares.mean() - (clients - 1)) <= 5 * spread


@pytest.mark.parametrize("build", [compress.rand_k, compress.top_k])
def test_a_wrong_k_is_one_clear_line(build):
    for k in (0, -1, 2.5, np.array([2, 0])):
        with pytest.raises(ValueError, match=r"_k: k: .* is not a whole number"):
            build(k)
    for k in (13, np.array([2, 13])):
        with pytest.raises(ValueError, match="k: 13 is not from 1 to 12, the entries"):
            sent_and_back(build(k), VECTOR)
    with pytest.raises(ValueError, match="but the server compresses"):
        build(K_BY_CLIENT).compress(VECTOR, jax.random.key(0), None)


def test_unknown_places_are_one_clear_line():
    with pytest.raises(ValueError, match="places: 'here' is not 'shared', 'seed'"):
        compress.rand_k(3, places="here")


def test_the_server_can_compress_too():
    payload = compress.rand_k(3).compress(VECTOR, jax.random.key(0), None)
    assert not isinstance(payload.values, Ragged)
    back = compress.rand_k(3).decompress(payload, 12, None, None)
    assert np.count_nonzero(back) == 3
