# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Aggregators: sums, reductions, and what attackers can do to them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import fedblend as fb
import problems
from fedblend.simulation import aggregators
from fedblend_reproductions.byzantine import byzantine

RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal((9, 2, 3)).astype(np.float32)
MASKS = {
    "all": np.ones(9, bool),
    "even number": np.arange(9) < 8,
    "scattered": np.array([1, 0, 1, 1, 0, 1, 0, 1, 1], bool),
    "one": np.arange(9) == 4,
    "two": np.arange(9) > 6,
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
NEAR: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}
"""Float32 sums of nine numbers of size 1."""


@each_mask
def test_median(mask):
    spoiled = np.where(mask[:, None, None], VALUES, np.nan)
    found = aggregators.median(jnp.asarray(mask), jnp.asarray(spoiled))
    np.testing.assert_allclose(found, np.median(VALUES[mask], axis=0), **NEAR)


def trim(fraction: float):
    stacked = aggregators.trimmed_mean(fraction).stacked
    assert stacked is not None
    return stacked


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.4, 0.49])
@each_mask
def test_trimmed_mean(mask, fraction):
    spoiled = np.where(mask[:, None, None], VALUES, -np.inf)
    found = trim(fraction)(jnp.asarray(mask), jnp.asarray(spoiled))
    ordered = np.sort(VALUES[mask], axis=0)
    cut = int(fraction * len(ordered))
    wanted = ordered[cut : len(ordered) - cut].mean(axis=0)
    np.testing.assert_allclose(found, wanted, **NEAR)


def ups(values):
    return {"a": jnp.asarray(values), "b": (jnp.asarray(values[:, 0, 0]),)}


@each_mask
def test_the_weighted_mean_is_the_same_by_chunks(mask):
    weights = np.arange(1, 10).astype(np.float32)
    running_sum = aggregators.empty(jax.tree.map(lambda leaf: leaf[0], ups(VALUES)))
    for chunk in np.split(np.arange(9), [3, 4]):
        running_sum, finite = aggregators.add_to(
            running_sum, ups(VALUES[chunk]), jnp.asarray(weights[chunk]), mask[chunk]
        )
        assert finite.all()
    aggregate = aggregators.finish(running_sum, 90.0)
    wanted = np.average(VALUES[mask], axis=0, weights=weights[mask])
    np.testing.assert_allclose(aggregate.mean["a"], wanted, **NEAR)
    np.testing.assert_allclose(aggregate.mean["b"][0], wanted[0, 0], **NEAR)
    assert float(aggregate.participation) == pytest.approx(weights[mask].sum() / 90)
    assert int(aggregate.count) == mask.sum()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_up_with_one_bad_entry_is_not_heard_at_all(value):
    spoiled = VALUES.copy()
    spoiled[2, 1, 1] = value
    running_sum = aggregators.empty(jax.tree.map(lambda leaf: leaf[0], ups(VALUES)))
    running_sum, finite = aggregators.add_to(
        running_sum, ups(spoiled), jnp.ones(9), jnp.ones(9, bool)
    )
    assert np.array_equal(finite, np.arange(9) != 2)
    aggregate = aggregators.finish(running_sum, 9.0)
    rest = np.delete(VALUES, 2, axis=0)
    np.testing.assert_allclose(aggregate.mean["a"], rest.mean(axis=0), **NEAR)
    assert float(aggregate.participation) == pytest.approx(8 / 9)


def test_nobody_heard_is_finite():
    running_sum = aggregators.empty(jax.tree.map(lambda leaf: leaf[0], ups(VALUES)))
    running_sum, _ = aggregators.add_to(
        running_sum, ups(VALUES), jnp.ones(9), jnp.zeros(9, bool)
    )
    aggregate = aggregators.finish(running_sum, 9.0)
    assert int(aggregate.count) == 0
    assert float(aggregate.participation) == 0
    assert not np.asarray(aggregate.mean["a"]).any()


def test_an_up_without_leaves_is_counted():
    running_sum, finite = aggregators.add_to(
        aggregators.empty(()), (), jnp.ones(4), jnp.array([1, 1, 0, 1], bool)
    )
    assert int(aggregators.finish(running_sum, 4.0).count) == 3
    assert finite.all()


def test_the_mean_of_half_precision_is_not_rounded_on_the_way():
    """A weight of 70000 is infinite in float16."""
    half = jnp.asarray([[1.0], [-1.0]], jnp.float16)
    running_sum = aggregators.empty(half[0])
    running_sum, _ = aggregators.add_to(
        running_sum, half, jnp.asarray([70000.0, 70000.0]), jnp.ones(2, bool)
    )
    mean = aggregators.finish(running_sum, 140000.0).mean
    assert mean.dtype == jnp.float16
    np.testing.assert_array_equal(mean, [0.0])


def test_whole_numbers_have_a_mean():
    counts = jnp.asarray([1, 2, 6], jnp.int32)
    running_sum = aggregators.empty(counts[0])
    running_sum, _ = aggregators.add_to(
        running_sum, counts, jnp.ones(3), jnp.ones(3, bool)
    )
    assert float(aggregators.finish(running_sum, 3.0).mean) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("name", "trim", "line"),
    [
        ("mode", 0.1, "reduction: 'mode' is not 'mean', 'median'"),
        ("trimmed_mean", 0.5, "trim: 0.5 is not in"),
        ("trimmed_mean", -0.1, "trim: -0.1 is not in"),
    ],
)
def test_an_unknown_reduction_is_refused_in_one_line(name, trim, line):
    with pytest.raises(ValueError, match=line):
        aggregators.reduction(name, trim)


CLIENTS, ROWS, DIM, SIGMA = 200, 9, 4, 1.5
RATE, ROUNDS = 0.5, 40
MU = np.array([1.0, -2.0, 0.5, 3.0])
FAILURE = 1e-4
"""How likely the bounds may fail, over all coordinates."""
HUGE = 1e4


def estimation(seed=0):
    """Clients that estimate mu, each from rows of its own."""
    rng = np.random.default_rng(seed)
    vectors = MU + SIGMA * rng.standard_normal((CLIENTS * ROWS, DIM))
    matrices = np.broadcast_to(np.eye(DIM), (CLIENTS * ROWS, DIM, DIM))
    parts = np.split(np.arange(CLIENTS * ROWS), CLIENTS)
    data = fb.federate((matrices, vectors), parts)
    return problems.Problem(data, problems.quadratic_loss, jnp.zeros(DIM))


ON = estimation()
FEDAVG = fb.fedavg(ON.loss, fb.Work(RATE, steps=1, batch_size=None))


def error(attack, factor, attackers, **settings):
    """The largest error of a coordinate in the end."""
    who = np.arange(CLIENTS) < attackers
    algorithm = byzantine(FEDAVG, attack, attackers=who, factor=factor)
    usual: dict[str, Any] = {"rounds": ROUNDS, "every": ROUNDS}
    run = fb.simulate(
        algorithm, ON.params, ON.federated_data, jax.random.key(0), **usual, **settings
    )
    return float(np.abs(np.asarray(run.complete().shared) - MU).max())


def of_median(attackers):
    t = np.log(2 * DIM / FAILURE) / 2
    within = np.sqrt(t / (CLIENTS - attackers))
    place = 0.5 + attackers / CLIENTS + within + 1 / CLIENTS
    assert place < 1, "too many attackers for the theorem"
    return SIGMA / np.sqrt(ROWS) * norm.ppf(place)


def of_trimmed_mean(attackers, cut):
    honest = CLIENTS - attackers
    assert cut >= attackers
    single = SIGMA / np.sqrt(ROWS)
    u = single * norm.isf(FAILURE / (4 * DIM)) / np.sqrt(honest)
    v = single * norm.isf(FAILURE / (4 * DIM * honest))
    part = cut / CLIENTS
    return (u + 3 * part * v) / (1 - 2 * part)


ATTACKS = [("negate", HUGE), ("inner_product", 1.0), ("negate", 1.0), ("noise", HUGE)]
START = (1 - RATE) ** ROUNDS * np.abs(MU).max() + 1e-5
"""What is left of the start; float32 on numbers of size 3."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        *ATTACKS[:2],
        *(pytest.param(attack, marks=pytest.mark.slow) for attack in ATTACKS[2:]),
    ],
    ids=[f"{name} {factor:g}" for name, factor in ATTACKS],
)
def test_errors_are_within_the_bound_of_the_theorem(attack):
    name, factor = attack
    attackers = 20
    found = error(name, factor, attackers, reduction="median")
    assert found <= of_median(attackers) + START
    found = error(name, factor, attackers, reduction="trimmed_mean")
    assert found <= of_trimmed_mean(attackers, cut=20) + START


def test_no_answer_at_all_breaks_the_bound_of_one_round():
    """Attackers that see all honest values and send one beside the best place."""
    honest = np.stack(
        [np.mean(ON.federated_data.train.rows(c)[1], 0) for c in range(CLIENTS)]
    )
    for sent in (-1e30, 1e30, *np.quantile(honest[20:], (0.01, 0.3, 0.7, 0.99))):
        values = jnp.asarray(np.where(np.arange(CLIENTS)[:, None] < 20, sent, honest))
        everyone = jnp.ones(CLIENTS, bool)
        middle = np.abs(aggregators.median(everyone, values) - MU).max()
        assert middle <= of_median(20)
        within = np.abs(trim(0.1)(everyone, values) - MU).max()
        assert within <= of_trimmed_mean(20, cut=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attackers", "settings"),
    [
        (1, {"reduction": "mean"}),
        (21, {"reduction": "trimmed_mean"}),
        (100, {"reduction": "median"}),
    ],
    ids=["mean, 1", "trimmed mean, 21 with trim 20", "median, 100 of 200"],
)
def test_one_attacker_more_than_a_reduction_allows_breaks_it(attackers, settings):
    """A long negated update then decides where the model goes."""
    assert error("negate", HUGE, attackers, **settings) > 100
    # All honest b_i are within 3 sigma / sqrt(n) of mu, and so are all medians.
    assert error("negate", HUGE, attackers - 1, **settings) < 3 * SIGMA


@pytest.mark.parametrize(("fraction", "count"), [(0.42, 150), (0.21, 300), (0.1, 40)])
def test_as_many_are_trimmed_as_the_fraction_says(fraction, count):
    """In float32 0.42 * 150 is 62.999996."""
    cut = round(fraction * count)
    values = np.zeros(count, np.float32)
    values[:cut] = 1e6
    everyone = jnp.ones(count, bool)
    assert float(trim(fraction)(everyone, jnp.asarray(values))) == 0
    values[cut] = 1e6
    assert float(trim(fraction)(everyone, jnp.asarray(values))) > 0


def started(reduction, attackers: int, **settings) -> np.ndarray:
    """Where FLIX starts, with x_i the mean of a client's rows."""
    local = fb.solvers.gradient_descent(ON.loss, 1.0, most=1)
    flix = fb.flix(ON.loss, lambda loss: FEDAVG, alpha=0.5, local=local)
    who = np.arange(CLIENTS) < attackers
    run = fb.simulate(
        byzantine(flix, "negate", attackers=who, factor=HUGE),
        ON.params,
        ON.federated_data,
        jax.random.key(0),
        rounds=1,
        reduction=reduction,
        **settings,
    )
    next(iter(run))
    return np.asarray(run.shared)


def test_what_clients_send_at_enrollment_is_reduced_as_in_rounds():
    """By hand: x_i is the mean of nine rows, and attackers send -HUGE x_i."""
    rows = np.asarray(ON.federated_data.train.examples[1], np.float64)
    sent = rows.reshape(CLIENTS, ROWS, DIM).mean(axis=1)
    sent[:20] *= -HUGE
    # The weights alpha^2 L = 0.25 travel with x_i, and -HUGE times for attackers.
    weights = np.where(np.arange(CLIENTS) < 20, -HUGE, 1.0)
    expected = np.median(sent, axis=0) / np.median(weights)
    found = started("median", 20)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.abs(found - MU).max() < of_median(20)
    assert np.abs(started(fb.trimmed_mean(0.2), 20) - MU).max() < 1
    assert np.abs(started("mean", 20) - MU).max() > 1
    small = started("median", 20, chunk=7)
    np.testing.assert_array_equal(small, found)
