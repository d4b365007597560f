# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedEM and HypCluster: their papers' loops, their limits, and each other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.batches import everything
from fedblend.losses import objective
from fedblend.simulation.sampling import cohorts
from reference import family_transcription as paper

CLIENTS, DIM, ROUNDS, COHORT, RATE, STEPS = 6, 3, 4, 4, 0.7, 3
KEY = jax.random.key(5)
TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
"""Float64 rounds at 1e-16; a dozen steps stay far below, another formula does not."""
FULL: dict[str, Any] = {"steps": STEPS, "batch_size": None}
NOISY: dict[str, Any] = {"steps": STEPS, "batch_size": 4}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def federation():
    """Clients whose labels follow one of two opposite rules, some of them mixed."""
    draws = np.random.default_rng(2)
    counts = (9, 5, 12, 7, 10, 6)
    inputs = draws.normal(size=(sum(counts), DIM))
    ends = np.cumsum(counts)
    sign = np.ones(sum(counts))
    sign[: ends[1]] = -1
    sign[ends[3] : ends[4] : 2] = -1
    labels = (sign * inputs[:, 0] + 0.3 * draws.normal(size=len(sign)) > 0).astype(int)
    return fb.federate((inputs, labels), np.split(np.arange(ends[-1]), ends[:-1]))


DATA = federation()
ROWS = [DATA.train.rows(client) for client in range(CLIENTS)]
ONE = fb.models.Model(lambda key: jnp.zeros(DIM), lambda theta, inputs: inputs @ theta)
ENSEMBLE = fb.models.ensemble(ONE, 2)
LOSS = fb.losses.logistic(ENSEMBLE.apply)
THETAS = np.random.default_rng(4).normal(size=(2, DIM))


def simulated(algorithm, params, **settings):
    chosen: dict[str, Any] = {"rounds": ROUNDS, "cohort": COHORT, "every": ROUNDS}
    return fb.simulate(algorithm, params, DATA, KEY, **(chosen | settings)).complete()


def start():
    return fb.models.Ensemble(jnp.zeros(2), jnp.asarray(THETAS))


def members():
    return cohorts(KEY, list(range(ROUNDS)), CLIENTS, COHORT).tolist()


def test_fedem_is_its_papers_loop():
    run = simulated(fb.algorithms.fedem(LOSS, fb.Work(RATE, **FULL)), start())
    thetas, weights = paper.fedem(ROWS, list(THETAS), members(), RATE, STEPS)
    np.testing.assert_allclose(run.shared.models, thetas, **TOLERANCE)
    states = run.client_states().weights
    np.testing.assert_allclose(states, weights, **TOLERANCE)
    assert states.max() > 0.8 and np.ptp(states[:, 0]) > 0.5, "all clients are alike"
    for client in (0, 5):
        inputs, labels = ROWS[client]
        q = paper.responsibilities(thetas, weights[client], inputs, labels)
        wanted = [paper.mixed_chance(thetas, q.mean(axis=0), x) for x in inputs]
        found = fb.predict(ENSEMBLE.apply, run.personal(client), jnp.asarray(inputs))
        np.testing.assert_allclose(jax.nn.sigmoid(found), wanted, **TOLERANCE)


def test_hypcluster_is_its_papers_loop():
    run = simulated(fb.algorithms.hypcluster(LOSS, fb.Work(RATE, **FULL)), start())
    thetas = paper.hypcluster(ROWS, list(THETAS), members(), RATE, STEPS)
    np.testing.assert_allclose(run.shared.models, thetas, **TOLERANCE)
    chosen = [paper.best(thetas, *rows) for rows in ROWS]
    assert set(chosen) == {0, 1}
    found = [int(run.personal(i).log_weights.argmax()) for i in range(CLIENTS)]
    assert found == chosen


@pytest.mark.slow
@pytest.mark.parametrize("build", [fb.algorithms.fedem, fb.algorithms.hypcluster])
def test_an_ensemble_of_one_is_fedavg(build):
    """The same batches; a batched product may round in another order."""
    single = fb.losses.logistic(ONE.apply)
    plain = simulated(fb.fedavg(single, fb.Work(RATE, **NOISY)), jnp.asarray(THETAS[0]))
    one = fb.models.Ensemble(jnp.zeros(1), jnp.asarray(THETAS[:1]))
    run = simulated(build(LOSS, fb.Work(RATE, **NOISY)), one)
    assert np.abs(plain.shared - THETAS[0]).max() > 0.1
    np.testing.assert_allclose(run.shared.models[0], plain.shared, **TOLERANCE)
    bits = 64 * (build is fb.algorithms.hypcluster)  # its choice, of one
    assert run.message_bits.up == plain.message_bits.up + bits
    inputs = jnp.asarray(ROWS[1][0])
    found = fb.predict(ENSEMBLE.apply, run.personal(1), inputs)
    np.testing.assert_allclose(found, inputs @ plain.shared, **TOLERANCE)


@pytest.mark.slow
def test_expectation_maximization_never_lowers_the_likelihood():
    """Small full steps of everybody on the surrogate: the joint loss only falls."""

    def joint():
        models = [run.personal(i) for i in range(CLIENTS)]
        batches = [everything(DATA.train.shard(i)) for i in range(CLIENTS)]
        pairs = zip(models, batches, DATA.train.counts, strict=True)
        return sum(count * objective(LOSS, model, rows) for model, rows, count in pairs)

    algorithm = fb.algorithms.fedem(LOSS, fb.Work(0.2, steps=1, batch_size=None))
    run = fb.simulate(algorithm, start(), DATA, KEY, rounds=12, every=1)
    losses = [float(joint()) for _ in run]
    assert len(losses) == 13
    assert (np.diff(losses) < 0).all()


@pytest.mark.slow
def test_rows_of_one_model_make_the_update_of_hypcluster():
    """Models so sure that responsibilities are zero and one."""
    inputs = np.abs(np.random.default_rng(0).normal(size=(5, DIM))) + 0.5
    shard = fb.shard_of((inputs, np.ones(5, int)))
    sure = fb.models.Ensemble(jnp.zeros(2), jnp.asarray([[0.1] * DIM, [-900.0] * DIM]))
    down = fb.Down(sure, jnp.zeros((), jnp.int32))
    found = []
    for build in (fb.algorithms.fedem, fb.algorithms.hypcluster):
        algorithm: Any = build(LOSS, fb.Work(RATE, **NOISY))
        _, state = algorithm.enroll(sure, shard, KEY)
        found.append(algorithm.client(down, state, shard, KEY)[0].delta.models)
    assert np.abs(found[1][0]).max() > 1e-9
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12, atol=1e-30)


@pytest.mark.parametrize("build", [fb.algorithms.fedem, fb.algorithms.hypcluster])
def test_a_model_that_diverged_is_nobodys(build):
    broken = fb.models.Ensemble(
        jnp.zeros(2), jnp.asarray([[jnp.nan] * DIM, [0.1] * DIM])
    )
    algorithm, shard = build(LOSS, fb.Work(RATE, **FULL)), DATA.train.shard(0)
    _, state = algorithm.enroll(broken, shard, KEY)
    down = fb.Down(broken, jnp.zeros((), jnp.int32))
    deployed = algorithm.personal(down, state, shard, KEY)
    np.testing.assert_allclose(jnp.exp(deployed.log_weights), [0, 1], atol=1e-12)


@pytest.mark.parametrize("build", [fb.algorithms.fedem, fb.algorithms.hypcluster])
def test_a_single_model_is_refused_in_one_line(build):
    algorithm = build(LOSS, fb.Work(RATE, **FULL))
    line = f"^{build.__name__}: params: one model is not an ensemble of models, "
    with pytest.raises(ValueError, match=line):
        simulated(algorithm, jnp.zeros(DIM))
