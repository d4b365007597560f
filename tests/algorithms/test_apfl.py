# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL: its shared path is FedAvg's, its ends, whose rows are used for what."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
import problems
from fedblend import mixing
from fedblend.data.federated import Shards
from fedblend.simulation.sampling import cohorts
from fedblend_reproductions.apfl.averaged import apfl_averaged

RATE, HELD = 0.2, 0.5
work: dict[str, Any] = {"steps": 3, "batch_size": 2}
on = problems.classes()
key = jax.random.key(0)


def run(algorithm, rounds=4, **settings):
    said = {"cohort": 4, "weights": "uniform", "every": rounds, **settings}
    return fb.simulate(
        algorithm, on.params, on.federated_data, key, rounds=rounds, **said
    ).complete()


def same_bits(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def visit(algorithm, problem=on, client=4, **told):
    """A client's first visit: its answer, and its state after."""
    shard = jax.device_put(problem.federated_data.train.shard(client))
    _, state = algorithm.enroll(problem.params, shard, key)
    aggregate = fb.Aggregate((), jnp.ones(()), jnp.ones((), jnp.int32))
    down, _ = algorithm.start(problem.params, aggregate, None, key)
    return jax.jit(algorithm.client)(down._replace(**told), state, shard, key)


@pytest.fixture(scope="module")
def averaged():
    """FedAvg, whose shared model APFL's must be."""
    return run(fb.fedavg(on.loss, fb.Work(RATE, **work)))


@pytest.fixture(scope="module")
def learned():
    """A run that learns alpha, and all states after every round."""
    done = fb.simulate(
        fb.apfl(on.loss, fb.Work(RATE, **work), alpha=0.5),
        on.params,
        on.federated_data,
        key,
        rounds=4,
        cohort=4,
        every=1,
    )
    return done, [[jax.device_get(done.client(i)) for i in range(7)] for _ in done]


def test_the_shared_path_is_fedavgs_bit_for_bit(averaged, learned):
    done, states = learned
    same_bits(done.shared, averaged.shared)
    assert len({float(state.alpha) for state in states[-1]}) > 5


def test_each_model_has_an_optimizer_of_its_own():
    """Clipping looks at all gradients together: those of v must not be among them."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))
    mine, _ = visit(fb.apfl(on.loss, fb.Work(optimizer, **work), alpha=0.5))
    theirs, _ = visit(fb.fedavg(on.loss, fb.Work(optimizer, **work)))
    same_bits(mine, theirs)


def test_a_correction_moves_the_shared_path_only_and_as_fedavgs():
    correction = jax.tree.map(jnp.ones_like, on.params)
    theirs, _ = visit(fb.fedavg(on.loss, fb.Work(RATE, **work)), correction=correction)
    algorithm = fb.apfl(on.loss, fb.Work(RATE, **work), alpha=0.0, learn="fixed")
    mine, state = visit(algorithm, correction=correction)
    same_bits(mine, theirs)
    _, without = visit(algorithm)
    same_bits(state, without)


def test_alpha_fixed_at_one_is_fedavg_and_at_zero_training_alone(averaged):
    ends = np.array([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    done = run(fb.apfl(on.loss, fb.Work(RATE, **work), alpha=ends, learn="fixed"))
    alone = run(fb.local_only(on.loss, fb.Work(RATE, **work)))
    for client, alpha in enumerate(ends):
        wanted = averaged.shared if alpha else alone.personal(client)
        same_bits(done.personal(client), wanted)
    assert np.abs(alone.personal(4).weight - on.params.weight).max() > 1e-2


def test_a_personal_model_survives_a_broadcast(learned):
    """Who is not in the last round keeps v and alpha, and mixes in the new model."""
    done, states = learned
    here = set(cohorts(key, [3], 7, 4)[0].tolist())
    for client in range(7):
        before, after = states[-2][client], states[-1][client]
        if client in here:
            assert np.abs(before.personal.weight - after.personal.weight).max() > 0
            continue
        same_bits(before, after)
        wanted = mixing.parameters(after.alpha, done.shared, after.personal)
        jax.tree.map(np.testing.assert_allclose, done.personal(client), wanted)
        assert np.abs(done.personal(client).weight - done.shared.weight).max() > 1e-3


def test_a_sweep_over_alpha_and_its_rate_is_single_runs(learned):
    def build(over):
        return fb.apfl(
            on.loss, fb.Work(RATE, **work), alpha=over[0], alpha_rate=over[1]
        )

    values = jnp.asarray([0.5, 0.2]), jnp.asarray([RATE, 50.0])
    swept = run(build, over=values)
    replicas = [swept.client(i) for i in range(7)]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-6),
        replicas,
        learned[1][-1],
    )
    far = np.array([replica.alpha[1] for replica in replicas])
    assert (far == 0).any()
    assert (far == 1).any()
    assert ((far >= 0) & (far <= 1)).all()


def other_rows(problem, value, held: bool):
    """The same problem with other inputs, in the held-out rows or in all others."""
    train = problem.federated_data.train
    inputs = np.array(train.examples[0])
    for start, count in zip(train.starts, train.counts, strict=True):
        first = start + int(np.floor(HELD * count))
        rows = slice(start, first) if held else slice(first, start + count)
        inputs[rows] = value
    shards = Shards((inputs, train.examples[1]), train.starts, train.counts)
    return problem._replace(federated_data=fb.FederatedData(shards))


def test_models_never_see_held_out_rows_and_alpha_sees_nothing_else():
    rng = np.random.default_rng(0)
    models = jax.tree.map(
        lambda leaf: rng.standard_normal((7, *leaf.shape)).astype(leaf.dtype), on.params
    )
    algorithm = fb.apfl(
        on.loss,
        fb.Work(RATE, **work),
        alpha=0.5,
        learn="round",
        held_out=HELD,
        local=fb.solvers.given(models),
    )
    up, state = visit(algorithm)
    same, other = visit(algorithm, other_rows(on, 3.0, held=True))
    same_bits(up, same)
    assert state.alpha != other.alpha
    _, elsewhere = visit(algorithm, other_rows(on, 3.0, held=False))
    assert state.alpha == elsewhere.alpha != 0.5
    assert np.abs(state.personal.weight - elsewhere.personal.weight).max() > 1e-3


@pytest.mark.parametrize("batch_size", [2, None])
def test_held_out_rows_are_handed_back_after_some_rounds(batch_size):
    """Until then nothing differs; then v sees all rows, as without any held out."""
    work = fb.Work(RATE, steps=3, batch_size=batch_size)
    handed = fb.apfl(on.loss, work, alpha=0.5, held_out=HELD, hand_back=2)
    held = fb.apfl(on.loss, work, alpha=0.5, held_out=HELD)
    everything = fb.apfl(on.loss, work, alpha=0.5, learn="fixed")
    early: dict[str, Any] = {"round": jnp.asarray(1, jnp.int32)}
    same_bits(visit(handed, **early), visit(held, **early))
    late: dict[str, Any] = {"round": jnp.asarray(2, jnp.int32)}
    same_bits(visit(handed, **late), visit(everything, **late))
    assert visit(held, **late)[1].alpha != 0.5


@pytest.mark.parametrize("batch_size", [2, None])
def test_who_can_hold_out_nothing_keeps_its_alpha(batch_size):
    work = fb.Work(RATE, steps=3, batch_size=batch_size)
    algorithm = fb.apfl(on.loss, work, alpha=0.5, held_out=HELD)
    for client, rows in enumerate(on.federated_data.train.counts):
        _, state = visit(algorithm, client=client)
        assert np.isfinite(state.personal.weight).all()
        assert (state.alpha == 0.5) == (rows == 1)
        assert np.isfinite(state.alpha)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha": 1.5}, r"alpha: 1.5 is not in \[0, 1\]"),
        ({"alpha": np.array([0.1, -0.2])}, "alpha: .* is not in"),
        ({"learn": "often"}, "learn: 'often' is not 'step', 'round'"),
        ({"held_out": 0.95}, r"held_out: 0.95 is not in \[0, 0.9\]"),
        ({"held_out": 0.2, "learn": "fixed"}, "held_out: 0.2 is not allowed with"),
        ({"hand_back": 5}, "hand_back: 5 is not allowed without held_out"),
        (
            {"held_out": 0.2, "hand_back": 0},
            "hand_back: 0 is not a whole number of",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=message):
        fb.apfl(on.loss, fb.Work(RATE, **work), **{"alpha": 0.5, **wrong})


def test_averages_need_one_number_of_steps():
    with pytest.raises(ValueError, match=r"steps: .* is not a whole number"):
        apfl_averaged(
            on.loss,
            fb.Work(RATE, steps=fb.Epochs(1), batch_size=2),
            alpha=0.5,
            shift=1.0,
        )
