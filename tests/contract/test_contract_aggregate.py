# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who is not heard: dropped out, or saying something that is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import CASES, SILENT, others_later

import fedblend as fb
from fedblend import keys
from fedblend.simulation.sampling import cohorts
from problems import quadratics, spoiled
from runs import (
    CLIENTS,
    SETTINGS,
    close,
    members,
    new_run,
    outcome,
    problem,
    same_bits,
    states,
    usual_run,
)

LOSSY = fb.Cohort(SETTINGS["cohort"], dropout=0.4)
SPOILED = 4
SPEAKING = [name for name in CASES if name not in SILENT]
INSISTING = {"diana, first(flix(scaffold))": 32 * 9}
"""Clients that say more until they are heard, and the bits of that: a whole model."""
CONTROLLED = ("scaffold", "scaffold, steps by client", "finetune(scaffold)")


@pytest.mark.parametrize("name", others_later(SPEAKING))
def test_an_answer_that_is_not_finite_is_rejected_and_counted(name):
    rejected(name, np.nan)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_an_answer_that_overflows_is_rejected_and_counted(name):
    rejected(name, 1e38)


def rejected(name: str, value: float) -> None:
    """A client whose rows are this is never heard, and nothing else suffers."""
    run = new_run(name, on=spoiled(problem(name), SPOILED, value))
    enrolled = None
    for _ in run:
        enrolled = enrolled or states(run)[SPOILED]
    appearances = int((members(run) == SPOILED).sum())
    assert appearances > 0
    assert sum(record.rejected for record in run.records) == appearances
    received = sum(record.received for record in run.records)
    assert received == 5 * run.cohort - appearances
    for leaf in jax.tree.leaves((run.down, run.server)):
        assert np.isfinite(leaf).all()
    same_bits(enrolled, states(run)[SPOILED])
    # Its upload was sent and counts, although nobody listened.
    sent, usual = (it.bits().up[SPOILED] for it in (run, usual_run(name)))
    assert sent == usual + INSISTING.get(name, 0) * (appearances - 1)


def invariant(run, weights) -> None:
    """The server's control is the weighted mean of all clients' controls."""
    controls = [state.control for state in states(run)]
    mean = jax.tree.map(
        lambda *leaves: np.average(np.stack(leaves), axis=0, weights=weights), *controls
    )
    assert np.abs(jax.tree.leaves(mean)[0]).max() > 1e-3
    close(jax.device_get(run.down.extra["scaffold"]), mean)


@pytest.mark.parametrize("name", CONTROLLED)
def test_the_server_control_is_the_mean_of_the_clients(name):
    invariant(usual_run(name), problem().federated_data.train.counts)


@pytest.mark.parametrize("name", CONTROLLED)
def test_the_server_control_is_the_mean_although_some_are_rejected(name):
    run = new_run(name, on=spoiled(problem(), SPOILED)).complete()
    assert sum(record.rejected for record in run.records) > 0
    invariant(run, problem().federated_data.train.counts)


@pytest.mark.parametrize("weights", ["by_count", "uniform"])
def test_the_server_control_is_the_mean_although_some_drop_out(weights):
    run = new_run("scaffold", cohort=LOSSY, every=1, weights=weights).complete()
    assert sum(record.dropped for record in run.records) > 0
    counts = problem().federated_data.train.counts
    invariant(run, counts if weights == "by_count" else np.ones(CLIENTS))


def test_clients_that_drop_out_keep_their_state():
    run = new_run("scaffold", cohort=LOSSY, every=1)
    before, dropped = None, 0
    for record in run:
        now = states(run)
        if before is not None:
            number = record.round - 1
            for client in members(run)[number].tolist():
                key = keys.derive(run.key, "dropout", number, client)
                changed = not _equal(before[client], now[client])
                assert changed == bool(jax.random.uniform(key) >= 0.4)
                dropped += not changed
        before = now
    assert dropped == sum(record.dropped for record in run.records) > 0


def test_nobody_heard_leaves_everything_and_the_round_goes_on():
    """With a cohort of one, some rounds have no one to hear."""
    alone = fb.Cohort(1, dropout=0.6)
    run = new_run("fedadam", cohort=alone, chunk=1, every=1, rounds=6)
    silent, before = 0, None
    for record in run:
        now = jax.device_get((run.down, run.server))
        assert now[0].round == record.round
        if before is not None and record.received == 0:
            silent += 1
            same_bits(before[0]._replace(round=now[0].round), now[0])
            same_bits(before[1], now[1])
        elif before is not None:
            assert not _equal(before[0].shared, now[0].shared)
        before = now
    assert 0 < silent < 6


def test_all_answers_rejected_leaves_everything():
    on = problem()
    for client in range(CLIENTS):
        on = spoiled(on, client)
    run = new_run("fedadam", on=on, rounds=2).complete()
    assert run.records[-1].rejected == 2 * SETTINGS["cohort"]
    same_bits(on.params, run.shared)
    fresh = iter(first := new_run("fedadam"))
    next(fresh)
    same_bits(first.server, run.server)


def test_dropped_clients_have_no_part_in_the_mean():
    """One step from a quadratic's start: the mean over exactly those heard."""
    on, rate, root = quadratics(), 0.1, jax.random.key(3)
    algorithm = fb.fedavg(on.loss, fb.Work(rate, steps=1, batch_size=None))
    run = fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        root,
        rounds=1,
        cohort=fb.Cohort(6, dropout=0.5),
    ).complete()
    ids = cohorts(root, [0], CLIENTS, 6)[0]
    lots = [
        jax.random.uniform(keys.derive(root, "dropout", 0, i)) for i in ids.tolist()
    ]
    aggregate = ids[np.array(lots) >= 0.5]
    assert run.records[-1].received == len(aggregate) not in (0, 6)
    rows = [on.federated_data.train.rows(i) for i in aggregate]
    matrices, vectors = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    start = np.asarray(on.params)
    wanted = start - rate * (matrices.mean(axis=0) @ start - vectors.mean(axis=0))
    np.testing.assert_allclose(run.shared, wanted, rtol=1e-5)


def test_an_answer_does_not_depend_on_cohort_mates_or_place():
    """The first answer of a client is the same in a cohort of 5 and in one of 7."""
    on = problem()
    algorithm = CASES["scaffold"](on)

    def enroll(params, shard, key):
        join, state = algorithm.enroll(params, shard, key)
        return join, (state, jax.tree.map(jnp.zeros_like, params))

    def client(down, client, shard, key):
        up, state = algorithm.client(down, client[0], shard, key)
        return up, (state, up.delta)

    witness = algorithm._replace(enroll=enroll, client=client)
    runs = [
        fb.simulate(
            witness,
            on.params,
            on.federated_data,
            jax.random.key(0),
            rounds=1,
            cohort=cohort,
            chunk=chunk,
        ).complete()
        for cohort, chunk in ((5, 5), (7, 4))
    ]
    for client_id in members(runs[0])[0].tolist():
        close(runs[0].client(client_id), runs[1].client(client_id))


def _equal(left, right) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_outcome_covers_both_sides_and_all_personal_models():
    (down, _), kept, models = outcome(usual_run("scaffold"))
    assert len(kept) == len(models) == CLIENTS
    assert down.round == SETTINGS["rounds"]
