# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Noise of the promised size, against NumPy; the same bits again; what is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import compress
from fedblend.core import Aggregate, Up
from fedblend.transforms.central_loss import parameter_loss
from fedblend.transforms.dp_fedavg import split_noise

CLIP, NOISE, COHORT, RATE = 0.15, 1.5, 4, 0.2
ERRORS = {"seed": 4, "system": 6}
"""Standard errors; noise of the system is new whenever a test runs."""
on = problems.quadratics()
full: dict[str, Any] = {"steps": 1, "batch_size": None}
descent = fb.fedavg(on.loss, fb.Work(RATE, **full))


def private(algorithm=descent, **changed):
    chosen = {"clip": CLIP, "noise": NOISE, "cohort": COHORT} | changed
    return fb.transforms.dp_fedavg(algorithm, **chosen)


def begin(algorithm, problem=on, **settings):
    return fb.simulate(
        algorithm,
        problem.params,
        problem.federated_data,
        jax.random.key(0),
        **{"rounds": 4, "cohort": COHORT, "every": 2, "chunk": 2, **settings},
    )


def one_step(algorithm, mean, count, key=0):
    """What the server makes of a mean over so many clients, from a model of zeros."""
    zeros = jax.tree.map(jnp.zeros_like, mean)
    down, server = algorithm.start(
        zeros, Aggregate((), *jnp.zeros(2)), None, jax.random.key(9)
    )
    extra = {name: mean.ravel()[0] for name in down.extra}
    aggregate = Aggregate(Up(mean, extra=extra), jnp.ones(()), jnp.asarray(count))
    return algorithm.server(aggregate, down, server, None, jax.random.key(key))[0]


@pytest.mark.parametrize("source", ["system", "seed"])
@pytest.mark.parametrize("count", [4, 1])
def test_noise_has_its_size_and_dropouts_do_not_lower_it(count, source):
    mean = {"a": jnp.full((100, 100), 0.5), "b": jnp.full(10_000, -1.0)}
    after = one_step(private(noise_from=source), mean, count).shared
    planned = NOISE * CLIP / COHORT
    noise = {k: np.asarray(after[k] - mean[k] * count / COHORT).ravel() for k in mean}
    most = ERRORS[source]
    for drawn in noise.values():
        assert abs(drawn.std() / planned - 1) < most / np.sqrt(2 * drawn.size)
        assert abs(drawn.mean()) < most * planned / np.sqrt(drawn.size)
    assert abs(np.corrcoef(noise["a"], noise["b"])[0, 1]) < most / 100


def test_noise_from_the_seed_is_a_function_of_the_key():
    mean, seeded = {"a": jnp.zeros(5)}, private(noise_from="seed")
    one, again, other = (one_step(seeded, mean, 4, key=k).shared for k in (0, 0, 1))
    np.testing.assert_array_equal(one["a"], again["a"])
    assert (np.asarray(one["a"]) != np.asarray(other["a"])).all()


@pytest.mark.parametrize("source", ["system", "seed"])
def test_with_a_quantile_both_kinds_of_noise_cost_as_much_as_one(source):
    """For replacing one: the sum moves by 2 C, the count by 1."""
    count_noise = 1.0
    left = split_noise(NOISE, count_noise)
    assert (2 / left) ** 2 + (1 / count_noise) ** 2 == pytest.approx((2 / NOISE) ** 2)
    algorithm = private(
        quantile=0.5, rate=1.0, count_noise=count_noise, noise_from=source
    )
    keys, zeros = jnp.arange(2000), jnp.zeros((2000, 3))
    draws = jax.vmap(lambda key, mean: _moved(algorithm, key, mean))(keys, zeros)
    steps, logs = map(np.asarray, draws)
    most = ERRORS[source]
    # The first round's C is the clip; b is 1/2 and noise, C moves by exp(-noise).
    planned = left * CLIP / COHORT
    assert abs(steps.std() / planned - 1) < most / np.sqrt(2 * steps.size)
    assert abs(logs.std() / (count_noise / COHORT) - 1) < most / np.sqrt(2 * logs.size)
    assert abs(np.corrcoef(steps[:, 0], logs)[0, 1]) < most / np.sqrt(2000)


def _moved(algorithm, key, mean):
    after = one_step(algorithm, mean, 4, key=key)
    return after.shared, jnp.log(after.extra["adaptive_clip"] / CLIP)


def test_a_resumed_run_has_the_same_bits_with_noise_from_the_seed(tmp_path):
    tracked = private(quantile=0.5, count_noise=2.0, noise_from="seed")
    whole, second = (
        begin(tracked, cohort=fb.Cohort(COHORT, dropout=0.3)) for _ in range(2)
    )
    blocks, path = iter(whole), tmp_path / "checkpoint"
    next(blocks)
    next(blocks)
    assert 0 < whole.round < 4
    fb.checkpoint.save(path, whole)
    fb.checkpoint.restore(path, second)
    whole.complete()
    second.complete()
    np.testing.assert_array_equal(second.shared, whole.shared)
    np.testing.assert_array_equal(
        second.down.extra["adaptive_clip"], whole.down.extra["adaptive_clip"]
    )
    assert np.isfinite(whole.shared).all()


def test_an_answer_that_is_not_finite_says_zeros_and_is_not_seen():
    spoiled = problems.spoiled(on, 2)
    ditto = fb.ditto(descent, on.loss, fb.Work(RATE, **full), lam=0.5)
    quiet = private(ditto, noise=0.0, cohort=7)
    done = begin(quiet, spoiled, cohort=7, rounds=1).complete()
    assert done.summary()["rejected"] == 0
    assert np.isfinite(done.client(2).personal).all()
    matrices, vectors = problems.client_matrices(on)
    steps = -RATE * (matrices @ np.asarray(on.params) - vectors)
    steps *= np.minimum(1, CLIP / np.linalg.norm(steps, axis=1))[:, None]
    steps[2] = 0
    np.testing.assert_allclose(done.shared, on.params + steps.sum(0) / 7, rtol=1e-5)


def test_flix_says_nothing_on_joining_and_keeps_its_local_models():
    local = fb.solvers.gradient_descent(on.loss, 5.0, most=3)
    flix = fb.flix(
        on.loss,
        lambda loss: fb.fedavg(loss, fb.Work(RATE, **full)),
        alpha=0.5,
        local=local,
    )
    done, plain = (begin(one, rounds=0) for one in (private(flix), flix))
    np.testing.assert_array_equal(done.complete().shared, on.params)
    assert not np.allclose(plain.complete().shared, on.params)
    np.testing.assert_array_equal(done.client(1).personal, plain.client(1).personal)


@pytest.mark.parametrize(
    "method",
    [
        fb.transforms.dp_fedavg,
        partial(fb.transforms.dp_blt, strategy=fb.theory.blt.Blt((0.75,), (0.6,))),
    ],
)
def test_the_server_clips_what_it_decodes(method):
    """rand_k(1) of three entries makes the one that it sends three times as long."""
    quiet = method(descent, clip=CLIP, noise=0.0, cohort=7)
    encoded = fb.transforms.compressed(quiet, compress.rand_k(1))
    loose = encoded._replace(
        wire=fb.transforms.compressed(descent, compress.rand_k(1)).wire
    )
    free, bounded = (
        begin(one, cohort=7, rounds=1, every=1).complete() for one in (loose, encoded)
    )
    moved, most = (np.linalg.norm(r.shared - on.params) for r in (bounded, free))
    assert moved <= CLIP
    assert most > 1.2 * moved


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"clip": 0.0}, "^dp_fedavg: clip: 0.0 is not a number above 0"),
        ({"noise": -1.0}, "^dp_fedavg: noise: -1.0 is not a number of at least 0"),
        ({"cohort": 0}, "^dp_fedavg: cohort: 0 is not a whole number"),
        ({"quantile": 0.5}, r"^dp_fedavg: count_noise: 0\.2 is not above half of the"),
        ({"quantile": 2.0, "count_noise": 9.0}, "quantile: 2.0 is not"),
        ({"noise_from": "time"}, "noise_from: 'time' is not 'system' or 'seed'"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(changed, line):
    with pytest.raises(ValueError, match=line):
        private(**changed)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"weights": "by_count"}, "^weights: .* needs 'uniform', not 'by_count'$"),
        ({"reduction": "median"}, "^reduction: 'median' breaks"),
        ({"cohort": 5}, "^cohort: .* built for 4 clients in a round, not 5$"),
        ({"cohort": None}, "^cohort: .* built for 4 clients in a round, not 7$"),
    ],
)
def test_runs_that_break_the_accounting_are_refused(settings, line):
    with pytest.raises(ValueError, match=line):
        begin(private(), **settings)


@pytest.mark.parametrize(
    ("inner", "line"),
    [
        (
            fb.scaffold(on.loss, fb.Work(RATE, **full)),
            "send more than an update of the model",
        ),
        (fb.transforms.compressed(descent, compress.rand_k(1)), "are encoded already"),
        (fb.local_only(on.loss, fb.Work(RATE, **full)), "send no update"),
    ],
)
def test_algorithms_that_say_more_or_less_are_refused(inner, line):
    with pytest.raises(ValueError, match=f"^dp_fedavg: .*{line}"):
        begin(private(inner))


def test_mixed_by_one_way_transfer_goes_around_and_others_do_not():
    penalty = parameter_loss(lambda params: params @ params)
    around = fb.transforms.mixed_fl(private(), penalty, how="one_way")
    sizes = begin(around).message_bits
    assert sizes.up == 3 * 32
    with pytest.raises(ValueError, match=r"^mixed_fl: these clients do not take plain"):
        begin(fb.transforms.mixed_fl(private(), penalty, how="two_way"))
    with pytest.raises(ValueError, match=r"^dp_fedavg: .* send more than an update"):
        begin(
            private(
                fb.transforms.mixed_fl(descent, penalty, how="two_way", upload=True)
            )
        )
