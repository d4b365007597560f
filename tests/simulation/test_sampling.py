# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Cohorts: drawn or dealt, fair, and a matter of seed and round alone."""

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.errors import SettingError
from fedblend.simulation.sampling import Strata, cohorts, dealt, drawing, plan_cohorts

ROOT = jax.random.key(3)


@pytest.mark.parametrize(("clients", "size"), [(10, 1), (10, 9), (7, 3), (10**6, 50)])
def test_members_are_distinct_sorted_and_in_range(clients, size):
    drawn = cohorts(ROOT, range(20), clients, size)
    assert drawn.shape == (20, size)
    assert (np.diff(drawn, axis=1) > 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < clients


def test_a_cohort_of_all_is_everybody():
    assert np.array_equal(cohorts(ROOT, [4, 5], 6, 6), [range(6), range(6)])


def test_a_rounds_cohort_does_not_depend_on_the_block_it_stands_in():
    whole = cohorts(ROOT, range(12), 30, 5)
    pieces = [cohorts(ROOT, r, 30, 5) for r in (range(5), range(5, 6), range(6, 12))]
    assert np.array_equal(whole, np.concatenate(pieces))
    assert np.array_equal(cohorts(ROOT, [11, 3], 30, 5), whole[[11, 3]])


def test_rounds_and_seeds_draw_different_cohorts():
    drawn = cohorts(ROOT, range(50), 1000, 10)
    assert len({tuple(row) for row in drawn.tolist()}) == 50
    other = cohorts(jax.random.key(4), range(50), 1000, 10)
    assert not (drawn == other).all(axis=1).any()


def chi_square(observed: np.ndarray, expected: float) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def test_every_client_is_equally_likely():
    """4000 draws of 3 from 11. Counts without replacement vary less than
    independent ones, so the 99.9 % point of chi-square(10), 29.6, is generous."""
    drawn = cohorts(ROOT, range(4000), 11, 3)
    counts = np.bincount(drawn.ravel(), minlength=11)
    assert chi_square(counts, 4000 * 3 / 11) < 29.6


def test_every_set_is_equally_likely():
    """All 10 pairs of 5 clients; 27.9 is the 99.9 % point of chi-square(9)."""
    drawn = cohorts(ROOT, range(4000), 5, 2)
    counts = np.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25)
    pairs = counts[counts > 0]
    assert len(pairs) == 10
    assert chi_square(pairs, 400) < 27.9


def test_the_fairness_check_can_fail():
    """Forgetting Floyd's replacement by the newest would favor low numbers."""
    rng = np.random.default_rng(0)
    drawn = np.stack([rng.integers(0, [9, 10, 11]) for _ in range(4000)])
    counts = np.bincount(drawn.ravel(), minlength=11)
    assert chi_square(counts, 4000 * 3 / 11) > 29.6


def test_within_an_epoch_nobody_is_dealt_twice_and_epochs_differ():
    hands = dealt(ROOT, range(12), 11, 3, epoch=3).reshape(4, 9)
    assert all(len(set(epoch)) == 9 for epoch in hands.tolist())
    assert len({tuple(epoch) for epoch in hands.tolist()}) == 4
    pieces = [dealt(ROOT, r, 11, 3, epoch=3) for r in (range(2), range(2, 12))]
    assert np.array_equal(np.concatenate(pieces).reshape(4, 9), hands)


def test_every_pair_is_equally_likely_in_each_round_of_an_epoch():
    """As above; the rounds of an epoch are not independent of each other."""
    drawn = dealt(ROOT, range(8000), 5, 2, epoch=2).reshape(4000, 2, 2)
    for place in range(2):
        pairs = np.bincount(drawn[:, place] @ [5, 1], minlength=25)
        assert (pairs > 0).sum() == 10
        assert chi_square(pairs[pairs > 0], 400) < 27.9


def test_populations_are_dealt_apart():
    strata = Strata([0, 1, 0, 1, 1, 0, 0], [0.5, 0.5], [2, 1])
    draw = drawing(7, 3, strata, epoch=2)
    for hands in draw(ROOT, range(20)).reshape(10, 2, 3):
        assert len(np.unique(hands)) == 6
        assert (np.isin(hands, [0, 2, 5, 6]).sum(axis=1) == 2).all()


@pytest.mark.parametrize(
    ("epoch", "cohort", "most"),
    [(0, 2, 3), (4, 2, 3), (2, Strata([0, 0, 0, 0, 1, 1, 1], [0.5, 0.5], [2, 2]), 1)],
)
def test_an_epoch_for_which_there_are_too_few_clients_is_refused(epoch, cohort, most):
    on = problems.quadratics()
    algorithm = fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None))
    line = rf"^epoch: {epoch} is not between 1 and {most}, the rounds that the 7 cl"
    with pytest.raises(ValueError, match=line):
        fb.simulate(
            algorithm,
            on.params,
            on.federated_data,
            ROOT,
            rounds=2,
            cohort=fb.Cohort(cohort, epoch=epoch),
        )


def test_a_run_deals_where_it_is_asked_to_and_checkpoints_know(tmp_path):
    on = problems.quadratics()
    algorithm = fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None))

    def begin(**more):
        what = (algorithm, on.params, on.federated_data, ROOT)
        return fb.simulate(*what, rounds=3, cohort=fb.Cohort(2, **more), every=3)

    run = begin(epoch=3).complete()
    heard = run.bits().up / run.message_bits.up
    assert sorted(heard.tolist()) == [0, 1, 1, 1, 1, 1, 1]
    fb.checkpoint.save(tmp_path / "saved", run)
    with pytest.raises(ValueError, match="was made with epoch 3, this run has None"):
        fb.checkpoint.restore(tmp_path / "saved", begin())


@pytest.mark.parametrize("how", ["fixed", "poisson"])
def test_private_cohorts_are_drawn_by_one_process_alone(how, monkeypatch):
    """Processes that draw by themselves could have a client in a round twice."""
    some = fb.Cohort(3, sampling=how)
    plan_cohorts(some, 10, secret=True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    plan_cohorts(some, 10)
    plan_cohorts(fb.Cohort(10), 10, secret=True)
    plan_cohorts(fb.Cohort(3, epoch=2), 10, secret=True)  # dealt by a key
    with pytest.raises(SettingError, match="cohort: 3 of 10 clients: is drawn from"):
        plan_cohorts(some, 10, secret=True)
