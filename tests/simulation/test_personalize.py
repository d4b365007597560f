# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients that join after the training, against NumPy, and what they leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.data.federated import FederatedData, Shards
from fedblend.trees import precision
from problems import COUNTS, quadratics

RATE, ALPHA, STEPS = 0.2, 0.3, 7
SHARED = np.array([0.7, -0.4, 1.1])
FULL = {"batch_size": None}


@pytest.fixture(scope="module")
def exact():
    with precision("float64"):
        yield quadratics()


def joined(algorithm, problem, visits, **settings):
    down = fb.Down(jnp.asarray(SHARED), jnp.zeros((), jnp.int32))
    found = fb.personalize(
        algorithm,
        down,
        problem.federated_data,
        jax.random.key(0),
        visits=visits,
        **settings,
    )
    np.testing.assert_array_equal(down.shared, SHARED)
    return np.asarray(found.models)


def by_hand(problem, gradient):
    """v from the shared model by steps along ``gradient(v, A, b)``."""
    models = []
    for client in range(problem.federated_data.clients):
        matrices, vectors = problem.federated_data.train.rows(client)
        v = SHARED.copy()
        for _ in range(STEPS):
            v = v - RATE * gradient(v, matrices.mean(axis=0), vectors.mean(axis=0))
        models.append(v)
    return np.stack(models)


def equation_17(problem):
    """The paper's (17), with its own weight of v, and the mixture that is deployed."""
    own = 1 - ALPHA

    def gradient(v, matrix, vector):
        return own * (matrix @ (own * v + (1 - own) * SHARED) - vector)

    return own * by_hand(problem, gradient) + (1 - own) * SHARED


def apfl(problem, steps):
    work = fb.Work(RATE, steps=steps, **FULL)
    return fb.apfl(problem.loss, work, alpha=ALPHA, learn="fixed")


def test_apfl_is_equation_17(exact):
    found = joined(apfl(exact, 1), exact, STEPS)
    np.testing.assert_allclose(found, equation_17(exact), atol=1e-10)


def test_more_than_one_step_a_visit_would_move_the_shared_model(exact):
    found = joined(apfl(exact, STEPS), exact, 1)
    assert np.abs(found - equation_17(exact)).max() > 1e-3


def test_pfedme_and_ditto_have_the_same_new_clients(exact):
    lam = 0.8

    def gradient(v, matrix, vector):
        return matrix @ v - vector + lam * (v - SHARED)

    expected = by_hand(exact, gradient)
    one = {"steps": 1, **FULL}
    shared = fb.fedavg(exact.loss, fb.Work(RATE, **one))
    work = fb.Work(RATE, steps=STEPS, **FULL)
    near = {"lam": lam, "inner_rate": RATE, "inner_steps": STEPS}
    ditto = joined(fb.ditto(shared, exact.loss, work, lam=lam), exact, 1)
    pfedme = joined(
        fb.algorithms.pfedme(exact.loss, fb.Work(RATE, **one), **near), exact, 1
    )
    np.testing.assert_allclose(ditto, expected, atol=1e-10)
    np.testing.assert_allclose(pfedme, expected, atol=1e-10)


def test_no_visits_of_finetuning_is_training_from_the_shared_model(exact):
    tuned = fb.finetune(
        fb.fedavg(exact.loss, fb.Work(RATE, steps=1, **FULL)),
        exact.loss,
        fb.Work(RATE, steps=STEPS, **FULL),
    )
    expected = by_hand(exact, lambda v, matrix, vector: matrix @ v - vector)
    np.testing.assert_allclose(joined(tuned, exact, 0), expected, atol=1e-10)


def test_measures_are_those_of_both_models(exact):
    down = fb.Down(jnp.asarray(SHARED), jnp.zeros((), jnp.int32))
    found = fb.personalize(
        apfl(exact, 1),
        down,
        exact.federated_data,
        jax.random.key(0),
        visits=STEPS,
        measure={"loss": fb.metrics.mean_loss(exact.loss)},
    )
    for model, params in (("shared", SHARED), ("personal", found.personal(2))):
        rows = exact.federated_data.train.rows(2)
        expected = np.mean(exact.loss(params, rows))
        got = found.measured["train"][model]["loss"][2]
        np.testing.assert_allclose(got, expected, rtol=1e-10)
    assert found.summary()["clients"] == len(COUNTS)


def test_unseen_clients_leave_no_trace_in_the_training():
    number = len(COUNTS) - 1
    problem, whole = quadratics(), quadratics().federated_data.train
    rows = jax.tree.map(lambda leaf: leaf[: sum(COUNTS[:-1])], whole.examples)
    without = FederatedData(Shards(rows, whole.starts[:number], whole.counts[:number]))
    ends = []
    for federated_data in (problem.federated_data.select(range(number)), without):
        algorithm = fb.fedavg(problem.loss, fb.Work(RATE, steps=1, batch_size=2))
        run = fb.simulate(
            algorithm,
            problem.params,
            federated_data,
            jax.random.key(3),
            rounds=3,
            cohort=3,
            every=3,
        )
        ends.append(np.asarray(run.complete().shared))
    np.testing.assert_array_equal(*ends)


def test_who_is_set_apart_depends_on_the_seed_alone():
    federated_data = fb.federate(
        (np.arange(60.0),), np.arange(60).reshape(20, 3), test=0.3
    )
    seen, unseen = fb.data.split_clients(federated_data, 0.2, seed=1)
    again = fb.data.split_clients(federated_data, 0.2, seed=1)[1]
    assert (seen.clients, unseen.clients) == (16, 4)
    assert unseen.names == again.names
    assert unseen.names != fb.data.split_clients(federated_data, 0.2, seed=2)[1].names
    assert sorted(map(int, seen.names + unseen.names)) == list(range(20))
    for split, whole in federated_data.splits.items():
        for client, name in enumerate(unseen.names):
            mine = unseen.splits[split].rows(client)[0]
            np.testing.assert_array_equal(mine, whole.rows(int(name))[0])


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.9])
def test_somebody_has_to_train(fraction):
    federated_data = fb.federate((np.arange(4.0),), np.arange(4).reshape(2, 2))
    with pytest.raises(
        ValueError, match=r"unseen|split_clients: fraction: .* is not in"
    ):
        fb.data.split_clients(federated_data, fraction)
