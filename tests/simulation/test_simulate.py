# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What ``simulate`` hands to an algorithm, gives back, and refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.errors import UserError
from fedblend.losses import objective
from fedblend.simulation.sampling import cohorts

on = problems.quadratics()
FULL: dict[str, Any] = {"steps": 1, "batch_size": None}
fedavg = fb.fedavg(on.loss, fb.Work(0.1, **FULL))
scaffold = fb.scaffold(on.loss, fb.Work(0.1, **FULL))


def simulate(algorithm=fedavg, key=None, **settings):
    key = jax.random.key(0) if key is None else key
    chosen: dict[str, Any] = {"rounds": 4} | settings
    return fb.simulate(algorithm, on.params, on.federated_data, key, **chosen)


NEEDS_ALL = fedavg._replace(needs=fb.Needs(everyone=True))
NEEDS_UNIFORM = fedavg._replace(needs=fb.Needs(uniform=True))

REFUSED: dict[str, dict[str, Any]] = {
    "cohort: 0 is not between 1 and the 7 clients": {"cohort": 0},
    "cohort: 8 is not between 1 and the 7 clients": {"cohort": 8},
    r"dropout: 1.0 is not in \[0, 1\)": {"cohort": fb.Cohort(dropout=1.0)},
    r"dropout: -0.1 is not in \[0, 1\)": {"cohort": fb.Cohort(dropout=-0.1)},
    "rounds: -1 is not a whole number of at least 0": {"rounds": -1},
    "every: 0 is not a whole number of at least 1": {"every": 0},
    "chunk: 0 is not a whole number of at least 1": {"chunk": 0},
    "weights: 'by_size' is not 'by_count' or 'uniform'": {"weights": "by_size"},
    "store: 'cloud' is not 'auto', 'device'": {"store": "cloud"},
    "reduction: 'mode' is not 'mean', 'median'": {"reduction": "mode"},
    "splits: 'exam' is not one of train": {"splits": ["exam"]},
    "measure: luck: .* is not a Metric.fn, higher_is_better., or a function": {
        "measure": {"luck": lambda model, batch: 0.0}
    },
    "measure: .* is not a mapping from names to metrics": {"measure": [len]},
    "measure_on: 8 is not between 1 and the 7": {"measure_on": 8},
    "measure_on: .0, 7. is not made of ids between 0 and 6": {"measure_on": [0, 7]},
    "measure_on: .. is not a whole number .*, or the ids": {"measure_on": []},
    "measure_on: .2, 1, 2. has the same client twice": {"measure_on": [2, 1, 2]},
    "key: float is not a key of JAX or a seed": {"key": 0.0},
    "key: -1 is not a whole number": {"key": -1},
    "key: True is not a whole number": {"key": True},
    "key: ArrayImpl is not a key of JAX": {"key": jax.random.PRNGKey(0)},
    "algorithm: a builder needs `over`": {"algorithm": lambda hyper: fedavg},
    "over: lengths .2, 3. of the sweep": {
        "algorithm": lambda hyper: fedavg,
        "over": (jnp.zeros(2), jnp.zeros(3)),
    },
    "cohort: this algorithm needs all 7 clients.*not 6": {
        "algorithm": NEEDS_ALL,
        "cohort": 6,
    },
    "needs all 7 clients in every round, not 7 with dropout 0.1": {
        "algorithm": NEEDS_ALL,
        "cohort": fb.Cohort(dropout=0.1),
    },
    "weights: this algorithm needs 'uniform', not 'by_count'": {
        "algorithm": NEEDS_UNIFORM
    },
    "reduction: 'median' breaks this algorithm": {
        "algorithm": scaffold,
        "reduction": "median",
    },
    "reduction: 'trimmed_mean' breaks this": {
        "algorithm": scaffold,
        "reduction": "trimmed_mean",
    },
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_in_one_line(line):
    with pytest.raises(ValueError, match=line) as error:
        simulate(**REFUSED[line])
    assert "\n" not in str(error.value)


def test_a_model_is_its_init_and_a_number_its_key():
    def init(key):
        return jax.random.normal(key, on.params.shape)

    model = fb.models.Model(init, lambda params, inputs: inputs @ params)
    pairs: Any = ((model, 7), (init, jax.random.key(7)), (init, np.int64(7)))
    one, *others = (
        fb.simulate(fedavg, params, on.federated_data, key, rounds=2).params
        for params, key in pairs
    )
    for other in others:
        np.testing.assert_array_equal(one, other)


def test_needs_that_are_met_are_not_in_the_way():
    simulate(NEEDS_ALL, cohort=7)
    simulate(NEEDS_UNIFORM, weights="uniform")
    chosen = fedavg._replace(needs=fb.Needs(uniform=True, weights="uniform"))
    assert simulate(chosen).settings.everyone == 7


def test_records_come_after_every_block_and_the_last_is_shorter():
    run = simulate(rounds=5, every=2)
    records = list(run)
    assert [record.round for record in records] == [0, 2, 4, 5]
    assert [record.rounds for record in records] == [0, 2, 2, 1]
    assert [record.received for record in records] == [0, 14, 14, 7]
    assert list(run) == []


def test_no_rounds_is_the_initial_model():
    run = simulate(rounds=0)
    np.testing.assert_array_equal(run.shared, on.params)
    assert [record.round for record in run.records] == [0]


def test_models_of_earlier_blocks_stay_readable():
    run, seen = simulate(scaffold, every=1), []
    for _ in run:
        seen.append((run.shared, run.client(2).control, run.personal(1)))
    values = np.array([np.asarray(shared) for shared, _, _ in seen])
    assert len(np.unique(values, axis=0)) == 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(seen))


def test_the_loss_measured_is_that_of_the_model():
    run = simulate(
        cohort=3, chunk=2, measure={"loss": fb.metrics.mean_loss(on.loss)}
    ).complete()
    rows = [fb.Batch(on.federated_data.train.rows(client)) for client in range(7)]
    wanted = np.array([objective(on.loss, run.shared, batch) for batch in rows])
    spread = run.records[-1].measures["train"]["shared"]["loss"]
    assert spread.mean == pytest.approx(wanted.mean(), rel=1e-5)
    counts = on.federated_data.train.counts
    weighted = np.average(wanted, weights=counts)
    assert spread.weighted == pytest.approx(weighted, rel=1e-5)


def test_a_metric_of_ones_own_says_which_direction_is_better():
    def largest(model, batch):
        return jnp.abs(batch.rows[1]).max() + model.sum()

    for higher in (True, False):
        luck = fb.Metric(largest, higher_is_better=higher)
        run = simulate(measure={"luck": luck}).complete()
        spread = run.records[-1].measures["train"]["shared"]["luck"]
        assert (spread.worst < spread.best) == higher


def test_results_have_names():
    measure = {"loss": fb.metrics.mean_loss(on.loss)}
    run = simulate(measure=measure).complete()
    found = run.result.train.personal.loss
    assert found == run.records[-1].measures["train"]["personal"]["loss"]
    assert run.result.train.shared["loss"] == found
    with pytest.raises(AttributeError, match="test was not measured; there is train"):
        _ = run.result.test
    with pytest.raises(AttributeError, match="local was not measured; there is pers"):
        _ = run.result.train.local
    with pytest.raises(AttributeError, match="auc was not measured; there is loss"):
        _ = run.result.train.shared.auc
    two = simulate(key=jax.random.split(jax.random.key(0)), measure=measure).complete()
    assert two.results == [record.measures for record in two.records[-1]]
    with pytest.raises(ValueError, match="result: this run has 2 replicas; `results`"):
        _ = two.result


def test_states_and_diagnostics_of_clients():
    algorithm = fb.apfl(on.loss, fb.Work(0.1, **FULL), alpha=np.linspace(0, 1, 7))
    for store in ("device", "host"):
        run = simulate(algorithm, cohort=2, store=store, rounds=1)
        states, some = run.client_states(), run.client_states([4, 2])
        np.testing.assert_array_equal(some.alpha, states.alpha[np.array([4, 2])])
        np.testing.assert_array_equal(run.client(4).personal, some.personal[0])
        np.testing.assert_array_equal(run.info([4, 2])["alpha"], some.alpha)
    keys = jax.random.split(jax.random.key(0), 3)
    assert simulate(algorithm, key=keys).info([5])["alpha"].shape == (1, 3)
    assert simulate(fedavg).info() == {}


def test_measuring_changes_nothing():
    measured = simulate(
        scaffold, cohort=3, every=1, measure={"loss": fb.metrics.mean_loss(on.loss)}
    )
    plain = simulate(scaffold, cohort=3, every=1)
    np.testing.assert_array_equal(measured.complete().shared, plain.complete().shared)


def greeting():
    """FedAvg whose clients say their number at enrollment, and start hears the mean."""

    def enroll(params, shard, key):
        del params, key
        return {"number": shard.id.astype(jnp.float32)}, ()

    def start(params, aggregate, central, key):
        del key
        shift = aggregate.mean["number"] + (0 if central is None else central.count)
        first = jax.tree.map(lambda leaf: leaf + shift, params)
        return fb.Down(first, jnp.zeros((), jnp.int32)), aggregate.participation

    return fedavg._replace(enroll=enroll, start=start)


@pytest.mark.parametrize("store", ["device", "host"])
def test_the_server_hears_everybodys_hello_before_it_starts(store):
    run = simulate(greeting(), rounds=0, store=store).complete()
    mean = np.average(np.arange(7), weights=on.federated_data.train.counts)
    np.testing.assert_allclose(run.shared, np.asarray(on.params) + mean, rtol=1e-6)
    assert float(run.server) == pytest.approx(1)
    assert run.bits().up.tolist() == [32] * 7
    assert run.bits().down.tolist() == [96] * 7


def test_the_servers_own_data_reaches_it():
    central = jax.device_put(on.federated_data.train.shard(4))
    alone = simulate(greeting(), rounds=0).complete()
    helped = simulate(greeting(), rounds=0, central=central).complete()
    np.testing.assert_allclose(helped.shared - alone.shared, 5.0, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_the_server_hears_whom_it_should_whatever_the_padding(chunk):
    """Its state is what it heard: two chunks of three hold a cohort of five."""

    def start(params, aggregate, central, key):
        down, _ = fedavg.start(params, aggregate, central, key)
        return down, (jnp.zeros(()), jnp.zeros((), jnp.int32))

    def server(aggregate, down, server, central, key):
        down, _ = fedavg.server(aggregate, down, (), central, key)
        return down, (aggregate.participation, aggregate.count)

    listening = fedavg._replace(start=start, server=server)
    run = simulate(listening, cohort=5, chunk=chunk, rounds=1).complete()
    counts = on.federated_data.train.counts
    ids = cohorts(run.key, [0], 7, 5)[0]
    assert int(run.server[1]) == 5
    assert float(run.server[0]) == pytest.approx(counts[ids].sum() / counts.sum())


def test_parameters_may_be_drawn_from_the_key():
    run = fb.simulate(
        fedavg,
        lambda key: jax.random.normal(key, (3,)),
        on.federated_data,
        jax.random.key(4),
        rounds=0,
    )
    np.testing.assert_array_equal(
        run.shared, jax.random.normal(jax.random.key(4), (3,))
    )


def test_weakly_typed_parameters_do_not_change_the_run():
    weak = jax.tree.map(lambda leaf: jnp.full((3,), 1.0), on.params)
    run = fb.simulate(
        fedavg, weak, on.federated_data, jax.random.key(0), rounds=2, every=1
    )
    assert not run.complete().shared.weak_type


@pytest.mark.parametrize("client", [-1, 7])
def test_a_client_that_is_not_there(client):
    run = simulate(rounds=0)
    with pytest.raises(ValueError, match=f"client: {client} is not between 0 and 6"):
        run.personal(client)


def test_every_key_may_have_its_own_split_of_the_same_clients():
    """One full gradient of each replica's own rows, by hand."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(60, 3)), draw.normal(size=60)
    parts = np.split(np.arange(60), [10, 25])
    splits = [fb.federate(rows, parts, test=0.3, split=split) for split in (0, 4)]

    def moved(params, inputs, targets):
        return params - 0.05 * inputs.T @ (inputs @ params - targets) / len(targets)

    loss = fb.losses.squared_error(lambda params, inputs: inputs @ params)
    tuned = fb.finetune(
        fb.fedavg(loss, fb.Work(0.05, **FULL)), loss, fb.Work(0.05, **FULL)
    )
    seeds = jax.random.split(jax.random.key(1), 2)
    settings: dict[str, Any] = {
        "rounds": 1,
        "measure": {"loss": fb.metrics.mean_loss(loss)},
        "splits": ["test"],
    }
    run = fb.simulate(tuned, jnp.zeros(3), splits, seeds, **settings).complete()
    for replica, federated_data in enumerate(splits):
        shared = moved(np.zeros(3), *federated_data.train.examples)
        own = moved(shared, *federated_data.train.rows(2))
        np.testing.assert_allclose(run.shared[replica], shared, rtol=1e-4)
        np.testing.assert_allclose(run.personal(2)[replica], own, rtol=1e-4)
        assert federated_data.test is not None
        inputs, targets = federated_data.test.rows(2)
        losses = (inputs @ own - targets) ** 2 / 2
        found = run.measured[replica]["test"]["personal"]["loss"][2]
        by_row = run.evidence.by_row[replica]["test"]["personal"]["loss"][2]
        np.testing.assert_allclose(found, losses.mean(), rtol=1e-4)
        np.testing.assert_allclose(by_row[: len(losses)], losses, rtol=1e-3)
    with pytest.raises(ValueError, match="federated_data: 2 of them is not a single"):
        fb.simulate(tuned, jnp.zeros(3), splits, seeds[0], **settings)
    other = fb.federate(rows, parts, test=0.5)
    with pytest.raises(ValueError, match="several must have the same clients"):
        fb.simulate(tuned, jnp.zeros(3), [splits[0], other], seeds, **settings)


def test_clients_that_do_not_fit_the_device_are_one_line():
    run = simulate(chunk=7)

    def full(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    run._engine.programs.compiled["block"] = full
    with pytest.raises(UserError, match="chunk: 7 is not small enough") as e:
        run.complete()
    assert "\n" not in str(e.value)


def test_a_run_is_set_up_by_few_programs():
    """One draws the parameters, one makes the states; by themselves it were dozens."""
    counted, counting = [], True
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: (
            counted.append(event)
            if counting and event.endswith("backend_compile_duration")
            else None
        )
    )
    model = fb.models.mlp(7, 3, hidden=(11, 13))
    rows = np.zeros((8, 7), np.float32), np.zeros(8, np.int32)
    work = fb.Work(0.1, steps=1, batch_size=2)
    fb.simulate(
        fb.apfl(fb.losses.cross_entropy(model.apply), work, alpha=0.5),
        model.init,
        fb.federate(rows, np.split(np.arange(8), 4)),
        jax.random.key(0),
        rounds=1,
    )
    counting = False
    # Also the key, and rows and types on their way to the device. What an earlier test
    # of this process had alike is not compiled again.
    assert 1 <= len(counted) <= 8
