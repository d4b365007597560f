# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Perm-k updates, and compressed broadcasts."""

import jax
import numpy as np
import pytest

import fedblend as fb
import loopback
import problems
from fedblend import compress, keys
from fedblend.transforms import downlink, perm_k

DIM, CLIENTS = 6, 7
on = problems.quadratics(dim=DIM)
descent = fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None))
noisy = fb.scaffold(on.loss, fb.Work(0.2, steps=3, batch_size=2))


def simulate(algorithm, problem=on, rounds=6, **settings):
    return fb.simulate(
        algorithm,
        problem.params,
        problem.federated_data,
        jax.random.key(0),
        rounds=rounds,
        every=rounds,
        weights="uniform",
        **settings,
    )


def run(*arguments, **settings):
    return simulate(*arguments, **settings).complete()


@pytest.mark.slow
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
    inner = fb.transforms.ef21(descent, compress.top_k(2)) if both else descent
    done = run(downlink(inner, compress.top_k(2)), rounds=800)
    np.testing.assert_allclose(done.shared, problems.optimum(on), atol=1e-5)


def test_only_the_change_travels_down():
    rounds = 4
    ours = run(downlink(descent, compress.top_k(2)), rounds=rounds)
    first = 32 * DIM  # the initial parameters, which a client remembers
    np.testing.assert_array_equal(ours.bits().down, first + rounds * (64 + 8))


def test_perm_k_is_exact_where_clients_agree():
    """The same rows at every client: every round is a step of gradient descent."""
    rows = jax.tree.map(
        lambda leaf: np.tile(leaf[:1], (7, *(1,) * (leaf.ndim - 1))),
        on.federated_data.train.examples,
    )
    same = on._replace(federated_data=fb.federate(rows, np.split(np.arange(7), 7)))
    ours, plain = run(perm_k(descent, clients=7), same), run(descent, same)
    np.testing.assert_allclose(ours.shared, plain.shared, rtol=1e-5, atol=1e-6)


def test_every_round_of_perm_k_has_its_own_blocks():
    run = simulate(perm_k(descent, clients=7), rounds=3)
    seeds, models = [], []
    run.every = 1
    for _ in run:
        models.append(np.asarray(run.shared))
        seeds.append(np.asarray(run.down.extra["permuted"]).tobytes())
    assert len(set(seeds)) == len(seeds) > 1
    np.testing.assert_array_equal(run.bits().up, 3 * 32 * 1)
    # By hand: of 6 entries and one of padding every client sends one.
    common = keys.named(keys.derive(jax.random.key(0), "start"), "permuted")
    matrices, vectors = problems.client_matrices(on)
    by_hand = np.array(models[0])
    for client, entry in enumerate(np.asarray(jax.random.permutation(common, 7))):
        if entry < DIM:
            mean_gradient = matrices[client] @ models[0] - vectors[client]
            by_hand[entry] -= 0.1 * mean_gradient[entry]
    np.testing.assert_allclose(models[1], by_hand, rtol=1e-5)


@pytest.mark.slow
def test_nodes_send_their_blocks_and_nothing_else(tmp_path):
    algorithm = perm_k(descent, clients=CLIENTS)
    wired = loopback.LoopbackFederation(
        algorithm,
        on.params,
        on.federated_data,
        jax.random.key(0),
        tmp_path,
        rounds=2,
        cohort=CLIENTS,
    )
    server = wired.complete(wired.server())
    done = run(algorithm, rounds=2)
    np.testing.assert_allclose(server.shared, done.shared, rtol=1e-6)
    np.testing.assert_array_equal(server.ledger.up, done.bits().up)
    np.testing.assert_array_equal(server.ledger.up, 2 * 32 * 1)


@pytest.mark.parametrize("many", [5, 8])
def test_perm_k_for_another_number_of_clients_is_refused(many, tmp_path):
    """In a simulation and on nodes: the blocks would not make up the vector."""
    message = f"built for {many} clients in a round, not 7$"
    with pytest.raises(ValueError, match=message):
        simulate(perm_k(descent, clients=many))
    with pytest.raises(ValueError, match=message):
        simulate(
            fb.transforms.compressed(descent, compress.perm_k(many)(jax.random.key(0)))
        )
    with pytest.raises(ValueError, match=message):
        loopback.LoopbackFederation(
            perm_k(descent, clients=many),
            on.params,
            on.federated_data,
            jax.random.key(0),
            tmp_path,
            rounds=1,
            cohort=CLIENTS,
        ).server()
    planned = fb.transforms.dp_fedavg(descent, clip=1.0, noise=1.0, cohort=CLIENTS)
    with pytest.raises(ValueError, match=rf"for {many} clients .* algorithm for 7$"):
        perm_k(planned, clients=many)


def test_what_they_refuse():
    with pytest.raises(ValueError, match=r"downlink: rand_k\(2\) does not contract"):
        downlink(descent, compress.rand_k(2))
    with pytest.raises(ValueError, match="perm_k: clients: 0 is not a whole number"):
        perm_k(descent, clients=0)
    nested = perm_k(fb.transforms.ef21(descent, compress.top_k(1)), clients=7)
    with pytest.raises(ValueError, match=r"updates .* are encoded already"):
        next(iter(simulate(nested)))
    for algorithm in (
        perm_k(descent, clients=7),
        downlink(descent, compress.sign()),
    ):
        with pytest.raises(ValueError, match="needs all 7 clients in every round"):
            simulate(algorithm, cohort=3)
    with pytest.raises(ValueError, match="needs 'uniform'"):
        fb.simulate(
            perm_k(descent, clients=7),
            on.params,
            on.federated_data,
            jax.random.key(0),
            rounds=1,
            weights="by_count",
        )
