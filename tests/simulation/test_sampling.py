# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Cohorts: drawn, dealt, in turns, by chance; fair, and a matter of seed and round."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

import fedblend as fb
import problems
from fedblend.simulation import sampling
from fedblend.simulation.sampling import (
    NOBODY,
    Strata,
    cohorts,
    deal,
    draw_with,
    plan_cohorts,
    poisson,
    take_turns,
)
from fedblend.theory.privacy import OVERFLOW, largest_cohort, overflow

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
    hands = deal(ROOT, range(12), 11, 3, epoch=3).reshape(4, 9)
    assert all(len(set(epoch)) == 9 for epoch in hands.tolist())
    assert len({tuple(epoch) for epoch in hands.tolist()}) == 4
    pieces = [deal(ROOT, r, 11, 3, epoch=3) for r in (range(2), range(2, 12))]
    assert np.array_equal(np.concatenate(pieces).reshape(4, 9), hands)


def test_every_pair_is_equally_likely_in_each_round_of_an_epoch():
    """As above; the rounds of an epoch are not independent of each other."""
    drawn = deal(ROOT, range(8000), 5, 2, epoch=2).reshape(4000, 2, 2)
    for place in range(2):
        pairs = np.bincount(drawn[:, place] @ [5, 1], minlength=25)
        assert (pairs > 0).sum() == 10
        assert chi_square(pairs[pairs > 0], 400) < 27.9


def test_populations_are_dealt_apart():
    strata = Strata([0, 1, 0, 1, 1, 0, 0], [0.5, 0.5], [2, 1])
    draw = draw_with(7, 3, strata, epoch=2)
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


on = problems.quadratics()
descent = fb.fedavg(on.loss, fb.Work(0.2, steps=1, batch_size=None))
POISSON = fb.Cohort(2, sampling="poisson")
OPTIONS: dict[str, Any] = {"clip": 0.15, "noise": 1.5, "cohort": 2}


def begin(algorithm, key=0, cohort: fb.Cohort | int = POISSON, **settings):
    usual: dict[str, Any] = {"rounds": 12, "cohort": cohort, "every": 4}
    return fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        jax.random.key(key),
        **usual | settings,
    )


@pytest.mark.parametrize("secret", [False, True])
def test_every_client_is_there_by_itself(secret):
    """Sizes are binomial, clients equally likely, pairs independent.

    Secret cohorts are new whenever the test runs: one run in a million fails.
    """
    drawn = poisson(ROOT, range(3000), 8, 3, 8, secret)
    there = np.stack([(drawn == client).any(axis=1) for client in range(8)])
    sizes = np.bincount(there.sum(axis=0), minlength=9)
    law = 3000 * stats.binom.pmf(np.arange(9), 8, 3 / 8)
    sizes[6] += sizes[7:].sum()
    law[6] += law[7:].sum()
    assert stats.chisquare(sizes[:7], law[:7]).pvalue > 1e-7
    # Standard errors of 3000 coins, and of their correlations.
    chance = 3 / 8
    error = np.sqrt(chance * (1 - chance) / 3000)
    assert np.abs(there.mean(axis=1) - chance).max() < 6 * error
    assert np.abs(np.corrcoef(there) - np.eye(8)).max() < 6 / np.sqrt(3000)


def test_ids_are_sorted_and_nobody_follows():
    drawn = poisson(ROOT, range(200), 8, 3, 8)
    for row in drawn:
        present = row[row != NOBODY]
        assert (np.diff(present) > 0).all()
        np.testing.assert_array_equal(row[: len(present)], present)
    pieces = [poisson(ROOT, r, 8, 3, 8) for r in (range(70), range(70, 200))]
    np.testing.assert_array_equal(np.concatenate(pieces), drawn)
    assert (poisson(ROOT, range(5), 8, 8, 8) == np.arange(8)).all()


def test_a_cohort_without_room_is_cut():
    whole, cut = (poisson(ROOT, range(200), 8, 3, most) for most in (8, 3))
    np.testing.assert_array_equal(cut, whole[:, :3])


@pytest.mark.parametrize(
    ("clients", "cohort"),
    [(7, 2), (400, 50), (400, 1), (3400, 100), (10**6, 1000), (20, 20), (30, 29)],
)
def test_there_is_room_with_the_stated_chance(clients, cohort):
    """Against SciPy's own binomial."""
    room = largest_cohort(clients, cohort)
    assert cohort <= room <= clients
    tail = stats.binom.sf(room, clients, cohort / clients)
    assert tail <= OVERFLOW * (1 + 1e-6)
    if room > cohort:
        less = stats.binom.sf(room - 1, clients, cohort / clients)
        assert less > OVERFLOW
        found = overflow(clients, cohort, np.array(room - 1))
        assert found == pytest.approx(less, rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_a_run_is_the_same_for_any_chunk_and_counts_those_who_were_there(chunk):
    algorithm = fb.transforms.dp_fedavg(descent, **OPTIONS, noise_from="seed")
    run = begin(algorithm, chunk=chunk).complete()
    drawn = run.cohorts.draw(run.key, range(12))
    assert (drawn == NOBODY).all(axis=1).any(), "no empty round; take another seed"
    assert sum(record.received for record in run.history()) == (drawn != NOBODY).sum()
    heard = run.bits().up / run.message_bits.up
    counts = np.bincount(drawn[drawn != NOBODY], minlength=7)
    np.testing.assert_array_equal(heard, counts)


def test_it_is_the_sum_over_those_who_are_there_in_numpy():
    """Divided by the planned size, also in an empty round, which has noise as well."""
    algorithm = fb.transforms.dp_fedavg(descent, **OPTIONS, noise_from="seed")
    run = begin(algorithm, every=1)
    drawn = run.cohorts.draw(run.key, range(12))
    matrices, vectors = problems.client_matrices(on)
    shared = np.asarray(on.params, float)
    for record in run:
        if record.round:
            members = drawn[record.round - 1]
            mean = np.zeros(3)
            for i in members[members != NOBODY]:
                step = -0.2 * (matrices[i] @ shared - vectors[i])
                mean += step * min(1, 0.15 / np.linalg.norm(step)) / 2
            after = np.asarray(run.shared, float)
            noise = (after - shared - mean) / (1.5 * 0.15 / 2)
            # Noise of its own in every round, the empty ones too; three entries.
            assert 0.01 < np.linalg.norm(noise) < 6, record.round
            shared = after
    quiet = fb.transforms.dp_fedavg(
        descent, **{**OPTIONS, "noise": 0.0, "noise_from": "seed"}
    )
    shared = np.asarray(on.params, float)
    for members in drawn:
        before = shared
        for i in members[members != NOBODY]:
            step = -0.2 * (matrices[i] @ before - vectors[i])
            shared = shared + step * min(1, 0.15 / np.linalg.norm(step)) / 2
    # Float32 against float64, over twelve rounds.
    last = begin(quiet).complete().shared
    np.testing.assert_allclose(last, shared, rtol=0, atol=1e-5)


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_states_of_those_who_are_absent_stay_in_any_store(store):
    """APFL's own models, side by side with room for others and one by one.

    Where nobody is a member of the block stands in, whose new state must stay. Float32
    may add in another order.
    """
    algorithm = fb.apfl(on.loss, fb.Work(0.2, steps=1, batch_size=None), alpha=0.5)
    alone = begin(algorithm, chunk=1).complete()
    together = begin(algorithm, store=store, chunk=7).complete()
    one, other = (jax.tree.leaves(run.client_states()) for run in (alone, together))
    for first, second in zip(one, other, strict=True):
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)


def test_private_cohorts_are_secret_and_checkpoints_know_the_sampling(tmp_path):
    algorithm = fb.transforms.dp_fedavg(descent, **OPTIONS)
    run, other = begin(algorithm), begin(algorithm)
    one, two = (some.cohorts.draw(some.key, range(40)) for some in (run, other))
    assert not np.array_equal(one, two)
    fb.checkpoint.save(tmp_path / "saved", run.complete())
    with pytest.raises(
        ValueError, match="was made with sampling poisson, this run has"
    ):
        fb.checkpoint.restore(tmp_path / "saved", begin(algorithm, cohort=2))


def test_in_turns_nobody_is_there_twice_in_so_many_rounds():
    for clients, size in ((7, 2), (12, 3), (5, 5), (11, 4)):
        drawn = take_turns(ROOT, range(40), clients, size)
        apart = clients // size
        for first in range(40 - apart + 1):
            window = drawn[first : first + apart].ravel()
            assert len(set(window.tolist())) == len(window)
        counts = np.bincount(drawn.ravel(), minlength=clients)
        assert counts.max() - counts.min() <= 1
    other = take_turns(jax.random.key(4), range(40), 11, 4)
    assert not np.array_equal(drawn, other)
    strata = Strata([0, 1, 0, 1, 1, 0, 0], [0.5, 0.5], [2, 1])
    draw = plan_cohorts(fb.Cohort(strata, separation=2), 7).draw
    hands = draw(ROOT, range(20))
    for first in range(19):
        assert len(np.unique(hands[first : first + 2])) == 6


def test_a_broken_turn_would_be_noticed():
    """Another order in every epoch does not keep clients apart."""
    drawn = sampling.deal(ROOT, range(40), 12, 3, epoch=4)
    windows = [drawn[first : first + 4].ravel() for first in range(37)]
    assert any(len(set(window.tolist())) < 12 for window in windows)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"sampling": "bernoulli"},
            "sampling: 'bernoulli' is not 'fixed' or 'poisson'",
        ),
        ({"epoch": 2}, "sampling: goes without epoch, which draws otherwise"),
        ({"separation": 2}, "sampling: goes without separation, which draws otherwise"),
        (
            {"sampling": "fixed", "separation": 4},
            "separation: 4 is not between 1 and 3, the rounds that the 7 clients",
        ),
        (
            {"sampling": "fixed", "separation": 2, "epoch": 2},
            "separation: goes without epoch, which draws otherwise",
        ),
        ({"size": np.array([0, 1])}, "sampling: 'poisson' needs a number of clients"),
        ({"size": 8}, "cohort: 8 is not between 1 and the 7 clients"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, line):
    cohort = dataclasses.replace(POISSON, **settings)
    with pytest.raises(ValueError, match=f"^{line}"):
        begin(descent, cohort=cohort)


def test_correlated_noise_is_refused():
    with pytest.raises(
        ValueError, match=r"^sampling: 'poisson' may draw rounds without"
    ):
        begin(fb.transforms.dp_blt(descent, **OPTIONS, strategy=fb.theory.blt.Blt()))
