# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""BLT noise: its covariance, its limits, the same bits again or never, what is refused.

Noise from the seed is compared with NumPy; noise of the operating system is new
whenever a test runs, so that its bounds are six standard errors wide.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
import problems
from fedblend import keys
from fedblend.core import Aggregate, Up
from fedblend.simulation.serialize import pack
from fedblend.theory.blt import INDEPENDENT, Blt, inverse
from fedblend.transforms import blt_noise
from fedblend.transforms.blt_noise import add_blt_noise
from fedblend.transforms.noise import GRAIN_BITS, NO_NAME
from fedblend.trees import precision

CLIP, NOISE, COHORT, RATE = 0.15, 1.5, 2, 0.2
STRATEGY = Blt((0.3, 0.9), (0.25, 0.4))
on = problems.quadratics()
full: dict[str, Any] = {"steps": 1, "batch_size": None}
descent = fb.fedavg(on.loss, fb.Work(RATE, **full))


def correlated(algorithm=descent, **changed):
    chosen: dict[str, Any] = {"clip": CLIP, "noise": NOISE, "cohort": COHORT}
    chosen |= {"strategy": STRATEGY, **changed}
    return fb.transforms.dp_blt(algorithm, **chosen)


TURNS = fb.Cohort(COHORT, separation=3)
LOSSY = fb.Cohort(COHORT, separation=3, dropout=0.4)


def begin(algorithm, key=0, params=on.params, **settings):
    usual: dict[str, Any] = {"rounds": 9, "cohort": TURNS, "every": 4}
    return fb.simulate(
        algorithm, params, on.federated_data, jax.random.key(key), **usual | settings
    )


def played(algorithm, rounds, size, empty=(), seed=5):
    """The model after each round in which all clients send zeros, or nobody answers."""
    zeros = jnp.zeros(size)
    root = jax.random.key(seed)
    down, server = algorithm.start(zeros, Aggregate((), *jnp.zeros(2)), None, root)
    step, models = jax.jit(algorithm.server), []
    for number in range(rounds):
        count = jnp.asarray(0 if number in empty else COHORT)
        aggregate = Aggregate(Up(zeros), jnp.ones(()), count)
        key = keys.derive(root, "server", number)
        after = step(aggregate, down, server, None, key)
        # As the runtime does: a round without an answer changes nothing.
        down, server = (down, server) if number in empty else after
        down = down._replace(round=down.round + 1)
        models.append(np.asarray(down.shared))
    return np.stack(models)


def toeplitz(column: np.ndarray) -> np.ndarray:
    size = len(column)
    rows = [
        [column[i - j] if j <= i else 0.0 for j in range(size)] for i in range(size)
    ]
    return np.array(rows)


@pytest.mark.parametrize("source", ["system", "seed"])
@pytest.mark.parametrize("strategy", [STRATEGY, Blt((0.75,), (0.6,)), INDEPENDENT])
def test_the_covariance_of_the_noise_is_that_of_the_inverse(source, strategy):
    """Of 40,000 entries; six standard errors of a covariance."""
    rounds, size = 7, 40_000
    algorithm = correlated(strategy=strategy, noise_from=source)
    models = played(algorithm, rounds, size) / (NOISE * CLIP / COHORT)
    noise = np.diff(models, axis=0, prepend=0)
    undone = toeplitz(inverse(strategy, rounds))
    expected = undone @ undone.T
    spread = np.sqrt(np.outer(np.diag(expected), np.diag(expected)) + expected**2)
    away = np.abs(noise @ noise.T / size - expected) / spread
    assert away.max() < 6 / np.sqrt(size)
    assert np.abs(noise.mean(axis=1)).max() < 6 * np.sqrt(expected.max() / size)


@pytest.mark.parametrize("source", ["system", "seed"])
def test_an_empty_round_is_a_round_of_the_strategy(source):
    """Else clients would be closer together than they are accounted for.

    Rounds 2, 3 and 5 have no answer: the next one has the noise of both.
    """
    rounds, size, empty = 7, 40_000, (2, 3, 5)
    models = played(correlated(noise_from=source), rounds, size, empty)
    models = models / (NOISE * CLIP / COHORT)
    for number in empty:
        np.testing.assert_array_equal(models[number], models[number - 1])
    sums = np.tril(np.ones((rounds, rounds))) @ toeplitz(inverse(STRATEGY, rounds))
    expected = (sums @ sums.T)[np.ix_([0, 1, 4, 6], [0, 1, 4, 6])]
    found = models[[0, 1, 4, 6]]
    spread = np.sqrt(np.outer(np.diag(expected), np.diag(expected)) + expected**2)
    assert (np.abs(found @ found.T / size - expected) / spread).max() < 6 / np.sqrt(
        size
    )


def test_it_is_the_algorithm_in_numpy_in_float64():
    """Nine rounds of noise from the seed, recomputed with matrices."""
    with precision("float64"):
        params = np.linspace(0, 0.5, 3)
        run = begin(correlated(noise_from="seed"), 1, params, every=1)
        matrices, vectors = problems.client_matrices(on)
        draws = []
        for number in range(9):
            key = keys.derive(run.key, "server", number)
            own = keys.named(keys.named(key, "privacy"), "sum")
            (own,) = jax.random.split(own, 1)
            draws.append(np.asarray(jax.random.normal(own, (3,), float)))
        noise = toeplitz(inverse(STRATEGY, 9)) @ np.stack(draws)
        shared, models = params, []
        for number, members in enumerate(run.cohorts.draw(run.key, range(9))):
            total = NOISE * CLIP * noise[number]
            for i in members:
                step = -RATE * (matrices[i] @ shared - vectors[i])
                total = total + step * min(1, CLIP / np.linalg.norm(step))
            shared = shared + total / COHORT
            models.append(shared)
        seen = [np.asarray(run.shared) for record in run if record.round]
        np.testing.assert_allclose(seen, models, rtol=0, atol=1e-12)


def test_without_buffers_it_is_dp_fedavg():
    options: dict[str, Any] = {"clip": CLIP, "noise": NOISE, "cohort": COHORT}
    options["noise_from"] = "seed"
    plain = fb.transforms.dp_fedavg(descent, **options)
    independent = fb.transforms.dp_blt(descent, **options, strategy=INDEPENDENT)
    one, other = (
        begin(algorithm).complete().shared for algorithm in (plain, independent)
    )
    # The same draws; float32 may add them in another order.
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_without_noise_and_clipping_it_is_fedavg_bit_for_bit():
    quiet = correlated(noise=0.0, clip=1e6)
    done = [
        begin(one, weights="uniform", chunk=1).complete() for one in (quiet, descent)
    ]
    np.testing.assert_array_equal(done[0].shared, done[1].shared)


def test_values_lie_on_the_grid_of_the_noise():
    std = NOISE * CLIP / COHORT
    models = played(correlated(), 1, 3000).astype(np.float64)
    grid = 2.0 ** (np.floor(np.log2(std)) - GRAIN_BITS)
    np.testing.assert_array_equal(models % grid, 0)
    assert 0.4 < ((models / grid).astype(int) % 2).mean() < 0.6


def test_noise_from_the_seed_is_the_same_after_a_resume_and_in_replicas(tmp_path):
    algorithm = correlated(noise_from="seed")
    whole, second = (begin(algorithm, cohort=LOSSY) for _ in range(2))
    blocks, path = iter(whole), tmp_path / "checkpoint"
    next(blocks)
    next(blocks)
    fb.checkpoint.save(path, whole)
    fb.checkpoint.restore(path, second)
    np.testing.assert_array_equal(second.complete().shared, whole.complete().shared)
    seeds = jnp.stack([jax.random.key(0), jax.random.key(1)])
    both = fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        seeds,
        rounds=9,
        cohort=LOSSY,
        every=4,
    ).complete()
    # Sums of replicas may be added in another order.
    np.testing.assert_allclose(both.shared[0], whole.shared, rtol=0, atol=1e-6)
    assert not np.allclose(both.shared[1], whole.shared, atol=1e-3)


def added(values, name, round, counts=True):
    step = jax.jit(partial(add_blt_noise, std=1.0, strategy=STRATEGY, key=None))
    found, name = step(values, state=name, round=round, counts=counts)
    return np.asarray(found), name


def test_a_name_is_used_once_and_a_new_strategy_begins_without_one():
    """Whoever goes on twice from one state gets no two sums with the same z."""
    zeros, size = jnp.zeros(40_000), 40_000
    first, one = added(zeros, NO_NAME, 0)
    second, two = added(zeros, one, 1)
    coupled = inverse(STRATEGY, 2)[1]
    assert np.mean(first * second) == pytest.approx(coupled, abs=6 * 1.3 / size**0.5)
    again, _ = added(zeros, one, 1)
    for earlier in (first, second):
        # Independent: beginning anew, with a variance of one.
        assert abs(np.mean(again * earlier)) < 6 * 1.3 / size**0.5
    assert again.var() == pytest.approx(1.0, abs=6 * np.sqrt(2 / size))
    same, kept = added(zeros, two, 2, counts=False)
    np.testing.assert_array_equal(same, 0)
    np.testing.assert_array_equal(kept, two)
    third, _ = added(zeros, two, 2)
    assert abs(np.mean(third * second)) > 0.1
    # A round before the one that buffers are for begins anew, too.
    _, three = added(zeros, NO_NAME, 5)
    earlier, _ = added(zeros, three, 2)
    assert earlier.var() == pytest.approx(1.0, abs=6 * np.sqrt(2 / size))


def test_buffers_that_nobody_comes_back_for_are_dropped(monkeypatch):
    monkeypatch.setattr(blt_noise, "_KEPT", {})
    monkeypatch.setattr(blt_noise, "MAX_BYTES", 3 * 2 * 2 * 8)
    names = [added(jnp.zeros(2), NO_NAME, 0)[1] for _ in range(5)]
    kept = [np.asarray(name).tobytes() for name in names[2:]]
    assert list(blt_noise._KEPT) == kept
    monkeypatch.setattr(blt_noise, "MAX_BYTES", 1)
    _, newest = added(jnp.zeros(2), NO_NAME, 0)
    assert list(blt_noise._KEPT) == [np.asarray(newest).tobytes()]


def test_a_resumed_run_begins_anew_and_reveals_no_buffer(tmp_path):
    """Whoever has the checkpoint and the run that went on cannot subtract its noise."""
    run, second, third = (begin(correlated()) for _ in range(3))
    blocks, path = iter(run), tmp_path / "checkpoint"
    next(blocks)
    next(blocks)
    fb.checkpoint.save(path, run)
    (name,) = [np.asarray(run.server.noise).tobytes()]
    buffers = blt_noise._KEPT[name].values
    saved = path.read_bytes() + pack(run.snapshot(), {})
    assert all(entry.tobytes() not in saved for entry in buffers.reshape(-1))
    for other in (second, third):
        fb.checkpoint.restore(path, other)
    models = np.stack([one.complete().shared for one in (run, second, third)])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(models[one] - models[other]).max() > 1e-3


@pytest.mark.parametrize("changed", [{"cohort": LOSSY}, {}])
def test_momentum_at_the_server_and_dropouts_run(changed):
    momentum = fb.algorithms.fedopt(on.loss, fb.Work(RATE, **full), optax.sgd(1.0, 0.5))
    run = begin(correlated(momentum), **changed).complete()
    assert np.isfinite(run.shared).all()


def test_what_breaks_the_accounting_is_refused():
    with pytest.raises(ValueError, match=r"^dp_blt: .* server is not linear in"):
        begin(
            correlated(
                fb.algorithms.fedopt(on.loss, fb.Work(RATE, **full), optax.adam(0.1))
            )
        )
    with pytest.raises(ValueError, match=r"^dp_blt: .* send more than an update"):
        begin(correlated(fb.scaffold(on.loss, fb.Work(RATE, **full))))
    with pytest.raises(ValueError, match=r"^dp_blt: strategy: .* is not a Blt with"):
        correlated(strategy=Blt((0.5,), (1.5,)))
    with pytest.raises(ValueError, match=r"^weights: .* needs 'uniform'"):
        begin(correlated(), weights="by_count")
    with pytest.raises(ValueError, match=r"^cohort: .* built for 2 clients"):
        begin(correlated(), cohort=1)
    with pytest.raises(ValueError, match=r"^sampling: 'poisson' may draw rounds"):
        begin(correlated(), cohort=fb.Cohort(COHORT, sampling="poisson"))
