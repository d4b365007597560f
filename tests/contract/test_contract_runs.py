# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every case, simulated: keys, traces, who is touched by what, and learning."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import CASES, ENROLLING, EVERYONE, others_later

import fedblend as fb
from fedblend import keys
from fedblend.losses import objective
from problems import spoiled
from runs import (
    CLIENTS,
    SETTINGS,
    client_function,
    close,
    cohort_of,
    differ,
    members,
    new_run,
    outcome,
    problem,
    same_bits,
    states,
    usual_run,
)

SEED_WITHOUT_CLIENT_0 = 12
"""With this seed client 0 is in neither of the first two cohorts."""

each_case = pytest.mark.parametrize("name", others_later(CASES))


@cache
def counted_run(name: str):
    """The usual run, compiled anew, and its client's traces until each block."""
    algorithm, calls = CASES[name](problem(name)), []

    def counted(*arguments):
        calls.append(1)
        return algorithm.client(*arguments)

    run = fb.simulate(
        algorithm._replace(client=counted),
        problem(name).params,
        problem().federated_data,
        jax.random.key(0),
        **{**SETTINGS, "cohort": cohort_of(name)},
    )
    traces = []
    for _ in run:
        run.personal(0)
        traces.append(len(calls))
    return run, traces


@each_case
def test_the_same_key_gives_the_same_bits(name):
    same_bits(outcome(usual_run(name)), outcome(counted_run(name)[0]))


@each_case
def test_another_key_gives_another_run(name):
    assert differ(outcome(usual_run(name)), outcome(new_run(name, seed=1)))


@each_case
def test_another_key_draws_other_batches(name):
    client, shard = client_function(name), jax.device_put(_shard(4))
    down, state = _first_words(name, shard)
    answers = [client(down, state, shard, jax.random.key(seed)) for seed in (0, 0, 1)]
    same_bits(answers[0], answers[1])
    assert differ(answers[0], answers[2])


@each_case
def test_the_client_is_traced_no_more_often_for_more_rounds(name):
    _, traces = counted_run(name)
    assert traces[1] == traces[-1]
    assert len(traces) == 4
    # One look at the shapes, then the block; JAX may trace the body of a scan twice.
    assert traces[-1] <= 3


@pytest.mark.parametrize("name", others_later(CASES))
def test_clients_that_are_not_chosen_keep_their_state(name):
    run, before = new_run(name), None
    for record in run:
        now = states(run)
        if before is not None:
            rounds = slice(record.round - record.rounds, record.round)
            absent = set(range(CLIENTS)) - set(members(run)[rounds].ravel().tolist())
            for client in absent:
                same_bits(before[client], now[client])
        before = now


def test_some_client_is_absent_from_some_block_of_the_usual_run():
    cohorts = members(usual_run("fedavg"))
    blocks = [set(cohorts[first : first + 2].ravel()) for first in (0, 2, 4)]
    assert any(len(block) < CLIENTS for block in blocks)


@pytest.mark.parametrize(
    "name",
    others_later(name for name in CASES if name not in ENROLLING + EVERYONE),
)
def test_rows_of_others_and_padding_change_nothing(name):
    """Client 0 fills the padding of a chunk, and takes no part itself."""
    seed, rounds = SEED_WITHOUT_CLIENT_0, 2
    assert not (members(new_run(name, seed=seed, rounds=rounds)) == 0).any()
    clean = new_run(name, seed=seed, rounds=rounds)
    dirty = new_run(name, on=spoiled(problem(name), 0), seed=seed, rounds=rounds)
    for run in (clean, dirty):
        run.complete()
    same_bits((clean.down, clean.server), (dirty.down, dirty.server))
    for client in range(1, CLIENTS):
        same_bits(clean.client(client), dirty.client(client))
        same_bits(clean.personal(client), dirty.personal(client))


@each_case
def test_only_a_clients_own_rows_enter_its_answer(name):
    client, key = client_function(name), keys.derive(jax.random.key(0), "client", 0, 4)
    clean = jax.device_put(_shard(4))
    down, state = _first_words(name, clean)
    others = np.ones(len(jax.tree.leaves(clean.examples)[0]), bool)
    others[int(clean.start) : int(clean.start + clean.count)] = False

    def garbage(leaf):
        filling = jnp.nan if leaf.dtype.kind == "f" else -999
        return leaf.at[others].set(jnp.asarray(filling, leaf.dtype))

    dirty = fb.Shard(
        jax.tree.map(garbage, clean.examples),
        clean.start,
        clean.count,
        clean.id,
        clean.capacity,
    )
    answer = client(down, state, clean, key)
    same_bits(answer, client(down, state, dirty, key))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(answer))


@each_case
def test_loss_goes_down(name):
    run = new_run(name, rounds=30)
    _, _, models = outcome(run)
    first = _mean_loss(name, [problem(name).params] * CLIENTS)
    assert _mean_loss(name, models) < 0.8 * first


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize(
    "name", ["fedavg, epochs", "fedadam", "scaffold", "local only"]
)
def test_any_chunk_gives_the_same_run_to_rounding(name, chunk):
    close(outcome(usual_run(name)), outcome(new_run(name, chunk=chunk)))


def _shard(client):
    return problem().federated_data.train.shard(client)


def _first_words(name, shard):
    algorithm = CASES[name](problem(name))
    join, state = algorithm.enroll(problem(name).params, shard, jax.random.key(0))
    aggregate = fb.Aggregate(join, jnp.ones(()), jnp.ones((), jnp.int32))
    down, _ = algorithm.start(problem(name).params, aggregate, None, jax.random.key(0))
    return algorithm.wire.tell(down, algorithm.wire.ask(state, shard)), state


def _mean_loss(name, models) -> float:
    train, loss = problem().federated_data.train, problem(name).loss
    rows = [fb.Batch(train.rows(client)) for client in range(CLIENTS)]
    pairs = zip(models, rows, strict=True)
    return float(np.mean([objective(loss, model, batch) for model, batch in pairs]))
