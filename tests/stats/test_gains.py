# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What clients gain, and how sure that is."""

from math import lgamma

import jax.numpy as jnp
import numpy as np
import pytest

from fedblend import metrics
from fedblend.core import Batch
from fedblend.stats.gains import PairedValues, gain, gain_summary

FINE = np.array([False])
ACCURACY = metrics.accuracy(lambda params, inputs: inputs)
LOSS = metrics.mean_loss(lambda params, rows: rows)


def sides(own, other) -> PairedValues:
    """One client by its rows."""
    own, other = (np.asarray(rows, float)[None] for rows in (own, other))
    return PairedValues(own.mean(1), other.mean(1), FINE, (own, other))


def of_counts(better: int, worse: int, rows: int) -> PairedValues:
    """A client with so many rows right by one model and wrong by the other."""
    own, other = np.zeros(rows), np.zeros(rows)
    own[:better] = other[better : better + worse] = 1
    return sides(own, other)


def found(metric: metrics.Metric, *seeds: PairedValues):
    rows = 0 if seeds[0].rows is None else seeds[0].rows[0].shape[1]
    return gain(metric, seeds, np.array([rows or 30]))


@pytest.mark.parametrize("rows", [4, 15])
def test_intervals_of_right_and_wrong_cover_what_is_true(rows):
    """By enumerating all outcomes, for all chances on a grid."""
    better, worse = np.meshgrid(np.arange(rows + 1), np.arange(rows + 1))
    inside = better + worse <= rows
    better, worse = better[inside], worse[inside]
    both = [of_counts(*pair, rows) for pair in zip(better, worse, strict=True)]
    own, other = (np.concatenate([s.rows[i] for s in both if s.rows]) for i in (0, 1))
    values = own.mean(1), other.mean(1)
    fine = np.zeros(len(both), bool)
    counts = np.full(len(both), rows)
    answer = gain(ACCURACY, [PairedValues(*values, fine, (own, other))], counts)
    same = rows - better - worse
    ways = np.array([
        lgamma(rows + 1) - lgamma(b + 1) - lgamma(w + 1) - lgamma(s + 1)
        for b, w, s in zip(better, worse, same, strict=True)
    ])  # fmt: skip
    for p in np.linspace(0.02, 0.94, 24):
        for q in np.arange(0.02, 0.97 - p, 0.04):
            logs = better * np.log(p) + worse * np.log(q) + same * np.log(1 - p - q)
            chance = np.exp(ways + logs)
            covered = (answer.low <= p - q) & (p - q <= answer.high)
            assert chance[covered].sum() > 0.95
            if p >= q:  # nobody is harmed: the alarm is false
                assert chance[answer.harmed].sum() < 0.025


def test_a_client_is_harmed_where_the_exact_test_says_so():
    assert not found(ACCURACY, of_counts(0, 5, 40)).harmed  # p = 2/2^5 = 0.0625
    assert found(ACCURACY, of_counts(0, 6, 40)).harmed  # p = 0.031
    assert found(ACCURACY, of_counts(6, 0, 40)).helped
    nothing = found(ACCURACY, of_counts(0, 0, 9))
    assert nothing.value == 0
    assert nothing.low == pytest.approx(-nothing.high)
    assert nothing.high == pytest.approx(1 - 0.025 ** (1 / 9))


def test_losses_have_the_interval_of_student():
    rows = np.array([0.1, 0.5, 0.2, 0.4, 0.3])
    answer = found(LOSS, sides(rows, np.zeros(5)))
    half = 2.776445 * rows.std(ddof=1) / np.sqrt(5)
    np.testing.assert_allclose(answer.value, -0.3)
    np.testing.assert_allclose(answer.low, -0.3 - half, rtol=1e-5)
    np.testing.assert_allclose(answer.high, -0.3 + half, rtol=1e-5)
    assert answer.harmed
    # A single row says nothing of others.
    single = found(LOSS, sides([1.0], [0.0]))
    assert (single.low, single.high) == (-np.inf, np.inf)


def test_seeds_that_say_the_same_of_the_same_rows_are_worth_one():
    one, two = of_counts(0, 8, 40), of_counts(0, 4, 40)
    alone, thrice = found(ACCURACY, one), found(ACCURACY, one, one, one)
    np.testing.assert_allclose(thrice.low, alone.low)
    np.testing.assert_allclose(thrice.high, alone.high)
    assert alone.harmed and thrice.harmed
    # Training makes the gains differ by more than 40 rows explain.
    differing = found(ACCURACY, one, two, of_counts(0, 0, 40))
    assert differing.value == pytest.approx(-0.1)
    assert differing.high > 0 and differing.low < -0.3


def test_seeds_with_other_rows_are_worth_all_of_them():
    """As of one client with the rows of all seeds, where these agree."""

    def numbered(own, other, first):
        return sides(own, other)._replace(numbers=first + np.arange(40)[None])

    for metric, one, other in (
        (ACCURACY, np.arange(40) < 4, np.zeros(40)),
        (LOSS, np.linspace(0, 1, 40), np.zeros(40)),
    ):
        seeds = [numbered(one, other, first) for first in (0, 40, 80)]
        whole = found(metric, sides(np.tile(one, 3), np.tile(other, 3)))
        several = found(metric, *seeds)
        np.testing.assert_allclose(several.low, whole.low, rtol=0.02)
        np.testing.assert_allclose(several.high, whole.high, rtol=0.02)
        assert several.low > found(metric, seeds[0]).low


def seeds_of(
    draw, clients, seeds, better, worse, *, again=1.0, pool=300, metric=ACCURACY
):
    """Clients with 60 test rows of their pool in each seed, split anew in each.

    A row says the same in all seeds with the chance ``again``, and else as a new one.
    The loss has the same mean and variance as right or wrong.
    """
    kept, found = draw.random((clients, pool)), []
    for _ in range(seeds):
        same = draw.random(kept.shape) < again
        chance = np.where(same, kept, draw.random(kept.shape))
        gaps = (chance < better) * 1.0 - (chance > 1 - worse)
        numbers = np.argsort(draw.random(kept.shape), axis=1)[:, :60]
        numbers = np.tile(np.arange(60), (clients, 1)) if pool == 60 else numbers
        own = np.maximum(np.take_along_axis(gaps, numbers, 1), 0)
        other = np.maximum(np.take_along_axis(-gaps, numbers, 1), 0)
        own, other = (other, own) if metric is LOSS else (own, other)
        values, fine = (own.mean(1), other.mean(1)), np.zeros(clients, bool)
        found.append(PairedValues(*values, fine, (own, other), numbers))
    return found


def named(draw, clients, seeds, gain_of_all, **how):
    """How often clients are called helped, and harmed, in a fifth discordant rows."""
    better, worse = 0.1 + gain_of_all / 2, 0.1 - gain_of_all / 2
    metric = how.setdefault("metric", ACCURACY)
    both = seeds_of(draw, clients, seeds, better, worse, **how)
    answer = gain(metric, both, np.full(clients, 60))
    return answer.helped.mean(), answer.harmed.mean()


def test_more_splits_name_more_clients_that_gain():
    draw, powers = np.random.default_rng(0), []
    for seeds in (1, 3, 5):
        powers.append(named(draw, 400, seeds, 0.1)[0])
        assert max(named(draw, 400, seeds, 0.0)) < 0.025 + 0.01
    assert powers[0] > 0.25 and powers[1] > 0.4 and powers[2] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, {"again": 0.7}, {"pool": 60}, {"pool": 60, "again": 0.7}, {"metric": LOSS}],
    ids=["splits", "retrained", "one split", "one split, retrained", "loss"],
)
def test_false_verdicts_are_rare_and_not_too_rare_with_any_number_of_splits(how):
    """At most 2.5 % on either side, not below 1; standard errors are below 0.1 %."""
    draw, powers = np.random.default_rng(1), []
    for seeds in (1, 3, 5):
        null = np.mean([named(draw, 4000, seeds, 0.0, **how) for _ in range(5)])
        assert 0.009 < null < 0.026, (seeds, null)
        powers.append(named(draw, 4000, seeds, 0.1, **how)[0])
    assert powers[0] > 0.28 and min(np.diff(powers)) > -0.02


def test_without_rows_the_least_favorable_pairs_are_assumed():
    paired = of_counts(6, 0, 30)
    known = found(ACCURACY, paired)
    values_only = found(ACCURACY, paired._replace(rows=None))
    np.testing.assert_allclose([values_only.low, values_only.high],
                               [known.low, known.high])  # fmt: skip
    half = PairedValues(np.array([0.5]), np.array([0.3]), FINE)  # 15 and 9 of 30 right
    unsure = found(ACCURACY, half)
    assert unsure.low < 0 < unsure.high
    assert found(LOSS, half).high == np.inf
    # Not a whole number of rows: the value is no mean of ones and zeros.
    broken = found(ACCURACY, half._replace(own=np.array([0.51])))
    assert (broken.low, broken.high) == (-1, 1)


@pytest.mark.parametrize("clients", [30, 100])
def test_by_chance_is_the_95_percent_point_of_harmed_clients(clients):
    """Exceeded by at most 5 % of federations of which each client is at 2.5 %."""
    known = np.zeros(clients + 1)
    known[-1] = np.nan  # nothing to compare
    nobody = found(ACCURACY, of_counts(0, 0, 30))
    whole = nobody._replace(value=known, low=known - 0.1, high=known + 0.1)
    counted = gain_summary(whole)
    harmed = np.random.default_rng(2).binomial(clients, 0.025, 100_000)
    assert (harmed > counted.by_chance).mean() <= 0.05
    assert (harmed > counted.by_chance - 1).mean() > 0.05


def test_who_is_not_finite_is_counted_and_never_left_out():
    nan, inf = float("nan"), float("inf")
    both = PairedValues(
        own=np.array([1.0, nan, 0.5, nan, 1.0]),
        other=np.array([nan, 1.0, 1.0, nan, -inf]),
        broken=np.array([False, True, True, False, False]),
    )
    counted = gain_summary(gain(ACCURACY, [both], np.array([5, 5, 5, 0, 5])))
    assert (counted.clients, counted.not_finite, counted.unmatched) == (0, 2, 2)
    assert (counted.count, counted.helped) == (0, 0)
    assert np.isnan([counted.share, counted.mean_gain]).all()


def test_the_mean_over_clients_has_an_interval_over_clients_and_seeds():
    def of(values):
        values = np.array(values)
        return PairedValues(values, 0 * values, np.zeros(4, bool))

    gaps = [0.1, 0.2, 0.3, 0.4]
    counts = np.full(4, 10)
    mean, low, high = gain(ACCURACY, [of(gaps)], counts).mean
    half = 3.182446 * np.std(gaps, ddof=1) / 2
    assert (mean, low, high) == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    shifted = [of(gaps), of(np.array(gaps) + 0.1)]
    mean, low, high = gain(ACCURACY, shifted, counts).mean
    seeds = 12.7062 * np.std([0.25, 0.35], ddof=1) / np.sqrt(2)
    assert high - mean == pytest.approx(np.hypot(half, seeds), rel=1e-4)


def scores_of(model, inputs):
    return inputs @ model


@pytest.mark.parametrize("name", ["accuracy", "auc", "recall", "sequence", "tags"])
def test_what_rows_bring_has_the_value_as_mean(name):
    draw = np.random.default_rng(1)
    inputs, model = draw.normal(size=(30, 4)), draw.normal(size=(4, 5))
    targets = draw.integers(0, 5, 30)
    apply, mask = scores_of, np.arange(30) < 25
    measure = metrics.auc if name == "auc" else metrics.accuracy
    if name == "auc":
        model, targets = model[:, 0], draw.integers(0, 2, 30)
    elif name == "sequence":
        inputs = draw.normal(size=(30, 6, 4))
        targets = draw.integers(-3, 5, (30, 6))
        measure = metrics.next_token_accuracy
    elif name in ("recall", "tags"):
        targets = draw.integers(0, 2, (30, 5)) if name == "tags" else targets
        measure = lambda apply: metrics.recall_at(apply, 2)  # noqa: E731
    batch = Batch((jnp.asarray(inputs), jnp.asarray(targets)), jnp.asarray(mask))
    value, rows = metrics.evaluate({"it": measure(apply)}, jnp.asarray(model), batch)
    rows = np.asarray(rows["it"])
    assert np.isnan(rows[25:]).all()
    np.testing.assert_allclose(np.nanmean(rows), value["it"], rtol=1e-5)
    if name == "auc":  # the variance of DeLong, DeLong and Clarke-Pearson
        scores = (inputs @ model)[mask]
        ones, zeros = (scores[targets[mask] == which] for which in (1, 0))
        wins = (ones[:, None] > zeros).astype(float)
        by_one, by_zero = wins.mean(1), wins.mean(0)
        exact = by_one.var() / len(ones) + by_zero.var() / len(zeros)
        np.testing.assert_allclose(np.nanvar(rows) / 25, exact, rtol=1e-4)


@pytest.mark.parametrize("length", [(), (2,)], ids=["rows", "sequences"])
def test_scores_that_are_nan_have_no_accuracy(length):
    """The class of the largest of NaN would be the first, right by chance."""

    def apply(model, inputs):
        del inputs
        return jnp.full((3, *length, 4), model)

    measure = metrics.next_token_accuracy if length else metrics.accuracy
    batch = Batch((jnp.zeros((3, 1)), jnp.zeros((3, *length), int)))
    assert measure(apply)(1.0, batch) == 1
    assert np.isnan(measure(apply)(np.nan, batch))
