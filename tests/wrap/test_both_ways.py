# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Perm-k answers, and compressed broadcasts."""

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import compress
from fedblend.wrap import downlink, permuted

DIM, CLIENTS = 6, 7
on = problems.quadratics(dim=DIM)
descent = fb.fedavg(on.loss, 0.1, steps=1, batch_size=None)
noisy = fb.scaffold(on.loss, 0.2, steps=3, batch_size=2)


def simulate(algorithm, problem=on, rounds=6, **settings):
    return fb.simulate(
        *(algorithm, problem.params, problem.federation, jax.random.key(0)),
        rounds=rounds,
        every=rounds,
        weights="uniform",
        **settings,
    )


def run(*arguments, **settings):
    return simulate(*arguments, **settings).complete()


def test_downlink_with_the_identity_is_the_wrapped_run():
    ours, plain = run(downlink(noisy, compress.identity())), run(noisy)
    np.testing.assert_allclose(ours.shared, plain.shared, rtol=1e-5, atol=3e-6)
    for client in range(CLIENTS):
        np.testing.assert_allclose(
            ours.personal(client), plain.personal(client), rtol=1e-5, atol=3e-6
        )


def test_clients_and_server_know_the_same_model():
    done = run(downlink(noisy, compress.top_k(2)))
    for client in range(CLIENTS):
        np.testing.assert_allclose(done.personal(client), done.shared, rtol=1e-6)
    assert np.abs(done.server.shared - done.shared).max() > 1e-4


@pytest.mark.parametrize("both", [False, True], ids=["down", "down and up"])
def test_downlink_reaches_the_optimum(both):
    inner = fb.ef21(descent, compress.top_k(2)) if both else descent
    done = run(downlink(inner, compress.top_k(2)), rounds=800)
    np.testing.assert_allclose(done.shared, problems.optimum(on), atol=1e-5)


def test_only_the_change_travels_down():
    rounds = 4
    ours = run(downlink(descent, compress.top_k(2)), rounds=rounds)
    first = 32 * DIM  # the initial parameters, which a client remembers
    np.testing.assert_array_equal(ours.ledgers[0].down, first + rounds * (64 + 8))


def test_permuted_is_exact_where_clients_agree():
    """The same rows at every client: every round is a step of gradient descent."""
    rows = jax.tree.map(
        lambda leaf: np.tile(leaf[:1], (7, *(1,) * (leaf.ndim - 1))),
        on.federation.train.examples,
    )
    same = on._replace(federation=fb.federate(rows, np.split(np.arange(7), 7)))
    ours, plain = run(permuted(descent, clients=7), same), run(descent, same)
    np.testing.assert_allclose(ours.shared, plain.shared, rtol=1e-5, atol=1e-6)


def test_every_round_of_permuted_has_its_own_blocks():
    run = simulate(permuted(descent, clients=7), rounds=3)
    seeds = []
    run.every = 1
    for _ in run:
        seeds.append(np.asarray(run.down.extra[1]).tobytes())
    assert len(set(seeds)) == len(seeds) > 1
    block = 32 * 1 + 64 + 32
    np.testing.assert_array_equal(run.ledgers[0].up, 3 * block)


def test_what_they_refuse():
    with pytest.raises(ValueError, match=r"downlink: rand_k\(2\) does not contract"):
        downlink(descent, compress.rand_k(2))
    with pytest.raises(ValueError, match="permuted: clients: 0 is not a whole number"):
        permuted(descent, clients=0)
    nested = permuted(fb.ef21(descent, compress.top_k(1)), clients=7)
    with pytest.raises(ValueError, match=r"permuted: what .* is encoded already"):
        next(iter(simulate(nested)))
    for algorithm in (permuted(descent, clients=7), downlink(descent, compress.sign())):
        with pytest.raises(ValueError, match="needs all 7 clients in every round"):
            simulate(algorithm, cohort=3)
    with pytest.raises(ValueError, match="needs 'uniform'"):
        fb.simulate(
            *(permuted(descent, clients=7), on.params, on.federation),
            jax.random.key(0),
            rounds=1,
            weights="by_count",
        )
