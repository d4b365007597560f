# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Training alone to its own best round: when it stops, which rows choose."""

import math
from itertools import takewhile

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.data.federated import rows_held_out
from fedblend.simulation import train_alone
from fedblend.simulation.result import LocalBudget, still_improving
from fedblend.simulation.simulate import RunSpec
from fedblend.simulation.train_alone import Look
from fedblend_federation.client.executor import Alone, ClientSetup, Executor

KEY = jax.random.key(0)
MEAN_LOSS = fb.metrics.mean_loss(lambda params, rows: rows)


def seen(curve, until):
    """Looks at a curve, a function of the round, as far as it is trained."""
    rounds = [0, *takewhile(lambda at: at <= until, train_alone.looks())]
    return [Look(at, curve(at)) for at in rounds]


def stopped(curve, least):
    """Where training by this curve ends."""
    for at in train_alone.looks():
        looks = seen(curve, at)
        if train_alone.has_ended(looks, least):
            return looks
    raise AssertionError


def test_a_slow_start_is_no_end():
    # As on femnist: nothing for some rounds, then most of it, then a little.
    looks = stopped(lambda at: 0.07 + 0.53 * at**2 / (40**2 + at**2), 100)
    assert 200 < looks[-1].round < 2000
    assert train_alone.best_of(looks).score == pytest.approx(0.6, abs=0.01)
    assert train_alone.has_settled(looks, 100)


def test_a_flat_accuracy_is_no_end_while_the_loss_falls():
    """As of a rare class: 91 % by predicting the other one, until round 100."""
    looks, least = [Look(0, 0.89, -0.7)], 50
    for at in train_alone.looks():
        accuracy = 0.912 if at < 100 else 0.96
        looks.append(Look(at, accuracy, -0.2 - 0.5 / (1 + at / 20)))
        if train_alone.has_ended(looks, least):
            break
    assert train_alone.best_of(looks).score == 0.96
    assert train_alone.has_settled(looks, least) or looks[-1].round >= 20 * least
    # The loss that overfits is no end either, while the accuracy rises.
    looks = [Look(0, 0.1, -2.3)]
    for at in train_alone.looks():
        looks.append(Look(at, 0.8 - 0.7 / (1 + at / 100), -1.0 - at / 100))
        if train_alone.has_ended(looks, least):
            break
    assert looks[-1].round > 500


def test_a_loss_that_falls_slowly_goes_on_to_the_bound_and_says_so():
    """A tiny rate: the loss falls by the same little in every round."""
    looks = [Look(0, 0.1, -2.3)]
    for at in train_alone.looks():
        looks.append(Look(at, 0.23, -2.3 + 1e-5 * at))
        if train_alone.has_ended(looks, 50):
            break
    found = train_alone.best_budget(looks, 50, "rows", "accuracy")
    assert found.improving and 1000 <= looks[-1].round < 1200
    (line,) = still_improving(found._asdict())
    assert f"still improved after {looks[-1].round} rounds" in line
    assert still_improving(found._replace(improving=False)._asdict()) == []


def test_what_gets_worse_again_is_taken_where_it_was_best():
    looks = stopped(lambda at: -abs(math.log((at + 1) / 9)), 50)
    assert train_alone.best_budget(looks, 50, "rows", "loss") == LocalBudget(
        8, "rows", "loss", looks[-1].round, False
    )
    assert 50 <= looks[-1].round < 65


def test_what_improves_for_ever_is_cut_short_and_said_so():
    looks = stopped(lambda at: float(at), 20)
    last = looks[-1].round
    assert 400 <= last < 500
    assert train_alone.best_budget(looks, 20, "rows", "mse") == LocalBudget(
        last, "rows", "mse", last, True
    )


def test_without_rows_that_say_anything_it_is_the_least():
    looks = stopped(lambda at: train_alone.score(MEAN_LOSS, math.nan), 30)
    assert train_alone.best_budget(looks, 30, "rows", "loss") == LocalBudget(30)


def test_what_becomes_finite_late_is_no_end():
    """Nothing was finite in the first half: all of the second is an improvement."""
    looks = seen(lambda at: 0.5 if at > 30 else -math.inf, 52)
    assert not train_alone.has_settled(looks, 50)
    assert train_alone.has_settled(seen(lambda at: 0.5, 52), 50)


def test_equal_scores_are_decided_by_the_second_then_by_the_first_round():
    looks = [Look(0, 1.0, -3.0), Look(1, 1.0, -2.0), Look(2, 1.0, -2.0)]
    assert train_alone.best_of(looks).round == 1


MODEL = fb.models.build("softmax", (8, 8, 1), 10)
LOSS = fb.losses.cross_entropy(MODEL.apply)
SETTINGS = {
    "rounds": 8,
    "measure": fb.metrics.standard("classes", LOSS, MODEL.apply),
}
ALONE = fb.local_only(LOSS, fb.Work(0.1, steps=1, batch_size=4))


def spec_of(federated_data, **settings) -> RunSpec:
    return RunSpec(ALONE, MODEL.init, federated_data, KEY, **SETTINGS, **settings)


def digits(counts, validation=0.0):
    """The first digits, some for every client."""
    inputs, labels = fb.datasets.load("digits").rows
    parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    rows = (inputs[: sum(counts)], labels[: sum(counts)])
    return fb.federate(rows, parts, validation=validation, test=0.2)


def test_without_validation_rows_only_training_rows_have_a_say():
    federated_data = digits((10, 20))
    trial = train_alone.trial_run(spec_of(federated_data), "accuracy")
    assert set(trial._engine.examples) == {"train", "validation"}
    assert trial.federated_data.validation is not None
    both = trial.federated_data.train.counts + trial.federated_data.validation.counts
    np.testing.assert_array_equal(both, federated_data.train.counts)


def test_every_block_of_the_trial_can_be_saved():
    """Between two looks as well: a store on disk is at most a block ahead."""
    federated_data = digits((10, 20))
    trial = train_alone.trial_run(spec_of(federated_data, every=1), "accuracy")
    rounds = [record.round for record in train_alone.prolong(trial, "accuracy", 5)]
    assert len(rounds) > 14
    assert rounds == list(range(len(rounds)))


def test_held_out_rows_leave_the_training_rows():
    federated_data = fb.federate(np.arange(9), [np.arange(2), np.arange(2, 9)])
    apart = federated_data.holding_out(0.2)
    assert apart.validation is not None
    assert apart.train.counts.tolist() == [2, 6]
    assert apart.validation.counts.tolist() == [0, 1]
    mine = [*apart.train.rows(1), *apart.validation.rows(1)]
    assert sorted(mine) == sorted(federated_data.train.rows(1))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [KEY, jax.random.split(KEY, 2)], ids=["one", "two"])
def test_a_rate_that_is_far_too_small_is_tuned(keys, monkeypatch):
    """From 0.0003; more than 10 times the rate needs a second grid."""
    monkeypatch.setattr(train_alone, "MOST", 1)
    monkeypatch.setattr(train_alone, "TRIES", 2)
    monkeypatch.setattr(train_alone, "_seconds", lambda run: 1.0)
    federated_data = digits((60, 80), 0.2)

    def alone(factor):
        return fb.local_only(LOSS, fb.Work(0.0003 * factor, steps=5, batch_size=10))

    def trained(algorithm):
        data = [federated_data] * 2 if keys.ndim else federated_data
        run = fb.train_alone(algorithm, MODEL.init, data, keys, **SETTINGS).complete()
        losses = [of["validation"]["personal"]["loss"] for of in run.measured]
        return run, np.mean(losses)

    (tuned, low), (plain, high) = trained(alone), trained(alone(1.0))
    assert tuned.budget is not None and plain.budget is not None
    assert tuned.budget.rate == pytest.approx(100) and plain.budget.rate == 1
    # Two grids and a trial of the rounds; the trial.
    assert (tuned.earlier_seconds, plain.earlier_seconds) == (3, 1)
    assert low < 0.9 * high


@pytest.mark.slow
@pytest.mark.parametrize("validation", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_node_chooses_as_the_simulator_does_for_it_alone(validation):
    federated_data = digits((40, 60), validation)
    problem = (MODEL.init, federated_data, KEY)
    run = fb.train_alone(ALONE, *problem, measure_on=[0], **SETTINGS).complete()
    assert run.budget is not None
    assert run.federated_data is federated_data
    assert run.cohort == 1  # who is not measured need not train
    held = "validation rows" if validation else "a held-out fifth of the training rows"
    assert run.budget.chosen_on == held
    params = MODEL.init(KEY)
    own = ClientSetup(
        client=0,
        algorithm=ALONE,
        params=jax.eval_shape(lambda tree: tree, params),
        root=KEY,
        splits=federated_data.select([0]).splits,
        capacities={name: of.capacity for name, of in federated_data.splits.items()},
        measures=SETTINGS["measure"],
        alone=Alone(ALONE, "accuracy", SETTINGS["rounds"]),
    )
    found, known = Executor(own).train_alone(params)
    assert known == run.budget._replace(chosen_on="its own rows")
    for split in federated_data.splits:
        (loss,) = run.measured[0][split]["personal"]["loss"]
        assert found[split]["loss"] == pytest.approx(loss, abs=1e-6)


def test_a_nodes_room_is_that_of_the_simulator():
    counts = np.arange(1, 200)
    kept = counts - [rows_held_out(int(n), train_alone.HELD_OUT) for n in counts]
    assert (np.diff(kept) >= 0).all()


def test_a_cohort_that_is_always_the_same():
    some = fb.simulate(ALONE, MODEL.init, digits((5, 5, 5)), KEY, rounds=1,
                       cohort=np.array([2, 0]))  # fmt: skip
    np.testing.assert_array_equal(some.cohorts.draw(KEY, [0, 7]), [[0, 2], [0, 2]])
    with pytest.raises(ValueError, match=r"is not made of ids between 0 and 2"):
        fb.simulate(ALONE, MODEL.init, digits((5, 5, 5)), KEY, rounds=1,
                    cohort=np.array([3]))  # fmt: skip
