# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L2GD: where its expected step and its runs end, and how often it communicates."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.contrib.l2gd import L2gdClient, Tosses

on = problems.quadratics()
N, DIM = 7, 3
MATRICES, VECTORS = problems.client_matrices(on)
TRAIN = jax.device_put(on.federated_data.train.shard(0))
STARTS, COUNTS = on.federated_data.train.starts, on.federated_data.train.counts


def optimum(lam):
    """All y_i: (A_i + lam I) y_i - lam ybar = b_i, as one linear system."""
    system = np.kron(np.eye(N) - 1 / N, lam * np.eye(DIM))
    for i, matrix in enumerate(MATRICES):
        place = slice(DIM * i, DIM * (i + 1))
        system[place, place] += matrix
    return np.linalg.solve(system, VECTORS.ravel()).reshape(N, DIM)


def down(shared, averaging, local, round=0) -> fb.Down:
    counts = (jnp.asarray(count, jnp.int32) for count in (averaging, local))
    return fb.Down(
        shared, jnp.asarray(round, jnp.int32), extra={"l2gd": Tosses(*counts)}
    )


def expected_end(rate, lam, p, tosses):
    """Where the mean of both outcomes of a coin leads to, toss after toss."""
    algorithm = fb.algorithms.l2gd(on.loss, rate, lam=lam, p=p, batch_size=None)

    def both(own, start, count, mean):
        shard = fb.Shard(TRAIN.examples, start, count, TRAIN.id, TRAIN.capacity)
        state, key = L2gdClient(own), jax.random.key(0)
        _, stepped = algorithm.client(down(mean, 0, 1), state, shard, key)
        pulled = algorithm.personal(down(mean, 1, 0), state, shard, key)
        return (1 - p) * stepped.personal + p * pulled

    def toss(_, own):
        mapped = jax.vmap(both, in_axes=(0, 0, 0, None))
        return mapped(own, jnp.asarray(STARTS), jnp.asarray(COUNTS), own.mean(axis=0))

    run = jax.jit(lambda own: jax.lax.fori_loop(0, tosses, toss, own))
    return np.asarray(run(jnp.tile(on.params, (N, 1))))


@pytest.mark.parametrize(
    ("rate", "lam", "p", "tosses"), [(0.3, 0.8, 0.4, 400), (0.04, 25.0, 0.5, 2000)]
)
def test_the_expected_toss_ends_at_the_optimum(rate, lam, p, tosses):
    reached = expected_end(rate, lam, p, tosses)
    np.testing.assert_allclose(reached, optimum(lam), rtol=0, atol=1e-5)


def test_the_optimum_goes_from_training_alone_to_fedavgs():
    own = [np.linalg.solve(a, b) for a, b in zip(MATRICES, VECTORS, strict=True)]
    np.testing.assert_allclose(optimum(0.0), own)
    shared = problems.optimum(on, "uniform")
    far, near = (np.abs(optimum(lam) - shared[None]).max() for lam in (25.0, 250.0))
    assert 8 < far / near < 12  # as 1/lam
    assert near < 1e-2


def test_without_a_pull_every_client_ends_at_its_own_optimum():
    run = fb.simulate(
        fb.algorithms.l2gd(on.loss, 0.5, lam=0.0, p=0.5, batch_size=None),
        on.params,
        on.federated_data,
        jax.random.key(0),
        rounds=60,
    ).complete()
    for client in range(N):
        found, wanted = run.personal(client), optimum(0.0)[client]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_with_a_whole_pull_it_is_fedavg():
    """The pull 0.25 * 4 * 0.5 / 0.5 is 1; the counts of coins are those of FedAvg."""
    plain = fb.algorithms.l2gd(on.loss, 0.25, lam=4.0, p=0.5, batch_size=None)
    counts = down(None, 1, 4).extra

    def server(*arguments):
        said, state = plain.server(*arguments)
        return said._replace(extra=counts), state

    def start(*arguments):
        said, state = plain.start(*arguments)
        return said._replace(extra=counts), state

    forced = plain._replace(start=start, server=server)
    averaged = fb.fedavg(on.loss, fb.Work(0.25, steps=4, batch_size=None))
    setting = (on.params, on.federated_data, jax.random.key(0))
    one, two = (
        fb.simulate(algorithm, *setting, rounds=3, weights="uniform").complete()
        for algorithm in (forced, averaged)
    )
    np.testing.assert_allclose(one.shared, two.shared, rtol=1e-6)
    np.testing.assert_array_equal(one.personal(3), one.shared)


@pytest.fixture(scope="module")
def replicas():
    """Twenty seeds of two rates, one ten times the other."""
    rates = np.repeat([0.02, 0.2], 20).astype(np.float32)
    build = partial(fb.algorithms.l2gd, on.loss, lam=0.8, p=0.3, batch_size=None)
    keys = jax.vmap(jax.random.key)(jnp.arange(40))
    run = fb.simulate(
        build, on.params, on.federated_data, keys, rounds=500, every=500, over=rates
    )
    return run.complete()


@pytest.mark.slow
def test_the_neighborhood_shrinks_with_the_rate(replicas):
    """Its squared radius is proportional to the rate."""
    models = np.stack([replicas.personal(client) for client in range(N)], axis=1)
    gaps = np.square(models - optimum(0.8)[None]).sum(axis=(1, 2))
    assert 4 < gaps[20:].mean() / gaps[:20].mean() < 25


def test_a_round_stands_for_the_expected_number_of_tosses(replicas):
    """20,000 rounds; a geometric(p) has the variance (1 - p)/p^2."""
    for found, p in ((replicas.server.averaging, 0.7), (replicas.server.local, 0.3)):
        error = np.sqrt((1 - p) / p**2 / 20_000)
        assert abs(np.mean(found) / 500 - 1 / p) < 5 * error
    share = 500 * 40 / np.sum(replicas.server)
    assert abs(share - 0.3 * 0.7) < 5e-3
    bits = replicas.bits()
    np.testing.assert_array_equal(bits.up, 500 * 32 * DIM)
    np.testing.assert_array_equal(bits.down, 500 * (32 * DIM + 64) + 32 * DIM)


def test_the_rate_may_follow_the_round():
    def algorithm(rate) -> Any:
        return fb.algorithms.l2gd(on.loss, rate, lam=0.5, p=0.5, batch_size=None)

    said = down(on.params + 1, 2, 3, round=4)
    answers = [
        algorithm(rate).client(said, L2gdClient(on.params), TRAIN, jax.random.key(0))
        for rate in (lambda round: 0.4 / (1 + round), 0.08, 0.4)
    ]
    np.testing.assert_allclose(answers[0][0].delta, answers[1][0].delta, rtol=1e-5)
    assert np.abs(answers[0][0].delta - answers[2][0].delta).max() > 1e-2


def test_a_nudge_is_a_linear_term_of_the_loss():
    push = jnp.asarray([0.3, -0.2, 0.1], jnp.float32)
    said, state = down(on.params + 1, 2, 3), L2gdClient(on.params)
    ups: Any = [
        fb.algorithms.l2gd(loss, 0.2, lam=0.5, p=0.5, batch_size=None).client(
            message, state, TRAIN, jax.random.key(0)
        )[0]
        for loss, message in (
            (on.loss, said._replace(correction=push)),
            (lambda x, rows: on.loss(x, rows) + x @ push, said),
        )
    ]
    np.testing.assert_allclose(ups[0].delta, ups[1].delta, rtol=1e-5)
    np.testing.assert_allclose(
        ups[0].mean_gradient, ups[1].mean_gradient - push, rtol=1e-4
    )


def test_what_makes_no_sense_is_refused_in_one_line():
    for settings, line in (
        ({"lam": -1.0, "p": 0.5}, "lam: -1.0 is not a number of at least 0"),
        ({"lam": 1.0, "p": 1.0}, r"p: 1.0 is not in \(0, 1\)"),
    ):
        with pytest.raises(ValueError, match=line):
            fb.algorithms.l2gd(on.loss, 0.1, batch_size=None, **settings)
    algorithm = fb.algorithms.l2gd(on.loss, 0.1, lam=1.0, p=0.5, batch_size=None)
    with pytest.raises(ValueError, match="needs all 7 clients"):
        fb.simulate(
            algorithm,
            on.params,
            on.federated_data,
            jax.random.key(0),
            rounds=1,
            cohort=3,
        )
