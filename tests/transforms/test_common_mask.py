# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Updates of the same entries at all clients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import compress, keys
from fedblend.errors import UserError
from fedblend.transforms import common_mask

DIM, RATE, K = 6, 0.1, 2
on = problems.quadratics(dim=DIM)
descent = fb.fedavg(on.loss, fb.Work(RATE, steps=1, batch_size=None))


def run(algorithm, rounds, **settings):
    return fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        jax.random.key(0),
        rounds=rounds,
        every=rounds,
        weights="uniform",
        **settings,
    ).complete()


def entries(rounds: int) -> list[np.ndarray]:
    """The entries of every round, by the keys of the server's messages."""
    root = jax.random.key(0)
    at = [keys.derive(root, "start")]
    at += [keys.derive(root, "server", number) for number in range(rounds - 1)]
    vector, found = jnp.ones(DIM), []
    for key in at:
        draw = compress.rand_k(K).compress(vector, keys.named(key, "one mask"), None)
        whole = compress.rand_k(K).decompress(draw, DIM, None, None)
        found.append(np.flatnonzero(np.asarray(whole)))
    return found


def by_hand(rounds: int, memory_rate: float) -> np.ndarray:
    """DIANA of the mean gradient, in NumPy: one client, the same masks."""
    matrices, vectors = problems.client_matrices(on)
    matrix, vector = np.mean(matrices, axis=0), np.mean(vectors, axis=0)
    x = np.asarray(on.params, np.float64)
    memory = np.zeros(DIM)
    for places in entries(rounds):
        difference = -RATE * (matrix @ x - vector) - memory
        sent = np.zeros(DIM)
        sent[places] = difference[places] * DIM / K
        x = x + memory + sent
        memory = memory + memory_rate * sent
    return x


@pytest.mark.parametrize("diana", [False, True])
def test_clients_with_one_mask_are_one_client(diana):
    how, rate = (
        (fb.transforms.diana, K / DIM) if diana else (fb.transforms.compressed, 0.0)
    )
    found = run(common_mask(descent, compress.rand_k(K), how=how), rounds=8)
    # A dozen roundings of float32 of numbers of the order of 1.
    np.testing.assert_allclose(found.shared, by_hand(8, rate), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.bits().up, 8 * 32 * K)


def test_it_reaches_the_optimum_without_memories():
    found = run(common_mask(descent, compress.rand_k(K)), rounds=1500)
    np.testing.assert_allclose(found.shared, problems.optimum(on), atol=1e-5)
    own = run(fb.transforms.compressed(descent, compress.rand_k(K)), rounds=1500)
    assert np.abs(own.shared - problems.optimum(on)).max() > 1e-3


def test_memories_stay_the_clients_mean_in_any_cohort():
    how = partial(fb.transforms.diana, rate=0.2)
    found = run(common_mask(descent, compress.rand_k(K), how=how), 5, cohort=3)
    kept = found.client_states().memory
    np.testing.assert_allclose(found.server.memory, kept.mean(axis=0), atol=1e-6)
    assert np.abs(found.server.memory).max() > 1e-3


@pytest.mark.parametrize(
    "wrong",
    [
        compress.top_k(2),
        compress.natural(),
        compress.rand_k(2, places="sent"),
        compress.rand_k(np.arange(1, 8)),
    ],
    ids=lambda one: one.name,
)
def test_other_compressors_are_refused_in_one_line(wrong):
    with pytest.raises(UserError, match=r"common_mask: compressor: .*one k"):
        common_mask(descent, wrong)
