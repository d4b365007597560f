# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Cox's partial likelihood, Kaplan-Meier, C-index and Brier score, row by row."""

import numpy as np
import pytest
from scipy.optimize import minimize

from fedblend.stats.survival import (
    RiskSets,
    concordance,
    integrated_brier,
    kaplan_meier,
    read_targets,
    survive,
    write_targets,
)

DRAW = np.random.default_rng(0)
ROWS = 40
TIMES = np.append(DRAW.integers(1, 15, ROWS - 1), 0.0)
"""With ties, and a row that was censored at 0."""
EVENTS = np.append(DRAW.random(ROWS - 1) < 0.6, False)
TARGETS = write_targets(TIMES, EVENTS)
INPUTS = DRAW.normal(size=(ROWS, 3))
MODEL = np.array([0.5, -1.0, 0.2])


def by_rows(model):
    """Minus the log partial likelihood, with the ties of Breslow."""
    scores, found = INPUTS @ model, 0.0
    for row in range(ROWS):
        if EVENTS[row]:
            at_risk = [other for other in range(ROWS) if TIMES[other] >= TIMES[row]]
            found += np.log(sum(np.exp(scores[at_risk]))) - scores[row]
    return found


def test_targets_keep_times_and_events():
    times, events = read_targets(TARGETS.astype(np.float32))
    assert (times == TIMES).all() and (events == EVENTS).all()


def test_the_loss_is_the_partial_likelihood_for_any_size_of_scores():
    found = RiskSets(TARGETS)
    assert found.loss(INPUTS @ MODEL) == pytest.approx(by_rows(MODEL))
    assert found.loss(INPUTS @ MODEL + 900) == pytest.approx(by_rows(MODEL))


def test_derivatives_are_those_of_differences():
    slope, curve = RiskSets(TARGETS).derivatives(INPUTS @ MODEL, INPUTS)
    size = 1e-5
    for place, move in enumerate(size * np.eye(3)):
        change = (by_rows(MODEL + move) - by_rows(MODEL - move)) / (2 * size)
        assert slope[place] == pytest.approx(change, rel=1e-6)
        sides = (MODEL + move, MODEL - move)
        up, down = (RiskSets(TARGETS).derivatives(INPUTS @ m, INPUTS) for m in sides)
        np.testing.assert_allclose(curve[place], (up[0] - down[0]) / (2 * size), 1e-5)


def test_kaplan_meier_by_hand():
    """Six rows: an event at 1, one of two at 3 (one censored), one at 4."""
    times = np.array([1.0, 2.0, 3.0, 3.0, 4.0, 5.0])
    seen = np.array([True, False, True, False, True, False])
    curve = kaplan_meier(times, seen)
    np.testing.assert_allclose(curve, [[1, 3, 4], [5 / 6, 5 / 8, 5 / 16]])
    np.testing.assert_allclose(
        survive(curve, np.array([0.5, 1, 3.5])), [1, 5 / 6, 5 / 8]
    )
    assert survive(curve, np.array([3.0]), "left") == pytest.approx(5 / 6)


def test_survival_of_equal_risks_is_that_of_nelson_and_aalen():
    found = RiskSets(TARGETS)
    hazard = 0.0
    for place, time in enumerate(found.times):
        hazard += 1 / (time <= TIMES).sum()
        assert found.survival(np.zeros(ROWS))[place] == pytest.approx(np.exp(-hazard))


def test_concordance_pair_by_pair():
    scores = np.round(INPUTS @ MODEL)  # with ties
    right = pairs = 0
    for one in range(ROWS):
        for other in range(ROWS):
            longer = TIMES[other] > TIMES[one]
            stays = TIMES[other] == TIMES[one] and not EVENTS[other]
            if EVENTS[one] and (longer or stays):
                pairs += 1
                right += (scores[one] > scores[other]) + (
                    scores[one] == scores[other]
                ) / 2
    assert concordance(scores, TARGETS) == pytest.approx(right / pairs)
    assert concordance(-TIMES, write_targets(TIMES, TIMES >= 0)) == 1
    assert np.isnan(concordance(scores, -TIMES))


def test_the_brier_score_moment_by_moment():
    """The integral as a sum over fine steps, with the weights by hand."""
    known, held = TARGETS[:25], TARGETS[25:]
    times, events = np.abs(known), ~np.signbit(known)
    last = np.sort(times)[int(0.9 * 24)]

    def stay(time, strict):
        chance = 1.0
        for point in np.unique(times[~events]):
            if point < time or (point == time and not strict):
                leaves = ((times == point) & ~events).sum()
                chance *= 1 - leaves / (times >= point).sum()
        return chance

    def survival(at):
        return np.exp(-np.outer(np.arange(1, 16), np.floor(at)) / 60)

    total, step = 0.0, 0.125
    for moment in np.arange(0, last, step):
        each = []
        for row, target in enumerate(held):
            chance = float(survival(np.array([moment]))[row, 0])
            if abs(target) > moment:
                each.append((1 - chance) ** 2 / stay(moment, strict=False))
            else:
                seen = not np.signbit(target)
                each.append(seen * chance**2 / stay(abs(target), strict=True))
        total += step * np.mean(each)
    assert integrated_brier(survival, held, known) == pytest.approx(total / last)


def test_cox_optimum_by_scipy():
    from fedblend.runs.auto.linear import PooledRows, hierarchical_models

    rows = PooledRows(
        np.insert(np.vstack([INPUTS, INPUTS[:20]]), 0, 1.0, axis=1),
        np.append(TARGETS, -TARGETS[:20]),
        np.array([ROWS, 20]),
    )
    events = (~np.signbit(rows.targets)).sum()
    slopes, ridge = 0.2, 0.05

    def value(here):
        shared, own = here[:3], here[3:].reshape(2, 3)
        total = events * ridge * (shared**2).sum() / 2 + (own**2).sum() / (2 * slopes)
        for at, model in zip(rows.clients, shared + own, strict=True):
            times, seen = np.abs(rows.targets[at]), ~np.signbit(rows.targets[at])
            scores = rows.inputs[at][:, 1:] @ model
            at_risk = times >= times[:, None]
            sums = np.log(at_risk @ np.exp(scores))
            total += (sums - scores)[seen].sum()
        return total

    least = minimize(value, np.zeros(9), method="BFGS", options={"gtol": 1e-8}).x
    found = hierarchical_models("survival", rows, 1, slopes=slopes, ridge=ridge)
    expected = least[:3] + least[3:].reshape(2, 3)
    np.testing.assert_allclose(found[:, 1:], expected, atol=1e-5)
    np.testing.assert_allclose(found[:, 0], 0, atol=1e-9)


@pytest.mark.parametrize(
    ("scores", "loss"), [((0.0, -800.0), 0.0), ((-800.0, -800.0), np.log(2))]
)
def test_scores_of_any_size_have_a_loss(scores, loss):
    """As of a year times a coefficient: only differences of scores count."""
    risks = RiskSets(np.array([1.0, 2.0]))
    assert risks.loss(np.array(scores)) == pytest.approx(loss, abs=1e-12)
