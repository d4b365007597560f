# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The rule that decides: the simplest method of those that are like the best."""

import numpy as np
import pytest
from scipy import stats

from fedblend.experiments.auto.decision import (
    Choice,
    Clients,
    Findings,
    beats_constant,
    choose,
    interval,
    judge,
    read_values,
    told_apart,
)
from fedblend.experiments.auto.verdict import sentences
from fedblend.gains import Gain

CLIENTS = 20
DRAW = np.random.default_rng(0)
NOISE = DRAW.normal(0, 0.01, (3, CLIENTS))
"""Differences between two methods that are alike, [splits, clients]."""


def shifted(by, seed=1):
    draw = np.random.default_rng(seed)
    return 0.5 + by + draw.normal(0, 0.01, (3, CLIENTS))


def test_alone_wins_where_nothing_can_be_told_apart():
    values = {
        "local_only": shifted(0.001),
        "fedavg": shifted(0, 2),
        "apfl": shifted(0, 3),
    }
    assert choose(values).method == "local_only"


def test_simplest_of_those_like_the_best():
    values = {
        "local_only": shifted(0.1),
        "fedavg": shifted(0.002, 2),
        "ditto": shifted(0, 3),
    }
    found = choose(values)
    assert (found.method, found.best) == ("fedavg", "ditto")
    assert found.alike == ["fedavg", "ditto"]
    assert found.p["local_only"] < 0.001


def test_clear_winner_wins_though_it_is_not_simple():
    values = {name: shifted(0.1, n) for n, name in enumerate(["local_only", "fedavg"])}
    assert choose(values | {"apfl": shifted(0, 9)}).method == "apfl"


def test_one_unlike_client_does_not_hide_the_others():
    """Its loss makes the spread of a mean wide; the signed ranks do not see it."""
    values = {"local_only": shifted(0.02), "fedavg": shifted(0, 2)}
    values["local_only"][:, 7] -= 1.0
    values["fedavg"][:, 8] -= 1.2
    assert choose(values).method == "fedavg"


def test_a_method_that_harms_one_client_and_helps_all_others_is_alike():
    """By the mean it is worse, by the ranks it is better: it may be deployed."""
    values = {"fedavg": shifted(-0.05, 2), "ditto": shifted(0, 3)}
    values["fedavg"][:, 7] += 2.0
    found = choose(values)
    assert (found.best, found.method) == ("ditto", "fedavg")


def test_worse_than_alone_on_average_is_no_choice():
    """FedAvg helps most clients and ruins one: alone would be better on average."""
    values = {
        "local_only": shifted(0.05),
        "fedavg": shifted(0, 2),
        "ditto": shifted(0.001, 3),
    }
    values["fedavg"][:, 7] += 2.0
    found = choose(values)
    assert found.method == "ditto" and found.alike == ["fedavg", "ditto"]
    told = FOUND._replace(choice=found, versus_alone="ditto")
    assert "FedAvg" not in sentences(told, SCORES, "log loss")[0]


def test_a_tie_with_alone_is_not_called_worse():
    values = {"local_only": shifted(0), "fedavg": shifted(0) + 1e-5 * NOISE + 1e-6}
    found = choose(values, constant=0.7)
    assert found.method == "local_only" and "fedavg" in found.alike


def test_what_is_negligible_does_not_count():
    values = {"local_only": shifted(0) + 0.001, "fedavg": shifted(0)}
    assert choose(values, constant=0.7).method == "local_only"
    assert choose(values, constant=0.51).method == "fedavg"


def test_a_method_that_diverged_is_not_chosen():
    values = {"local_only": shifted(0), "fedavg": shifted(0) * np.inf}
    assert choose(values).best == "local_only"


def test_clients_without_rows_do_not_count():
    values = {"local_only": shifted(0.1), "fedavg": shifted(0, 2)}
    for of in values.values():
        of[:, 3] = np.nan
    assert choose(values).method == "fedavg"


def test_two_clients_are_compared_over_splits():
    """The corrected resampled t-test, written out with scipy."""
    gaps = np.array([[0.1, 0.2], [0.12, 0.18], [0.09, 0.22], [0.1, 0.2], [0.11, 0.21]])
    means = gaps.mean(axis=1)
    error = np.sqrt((1 / 5 + 1 / 3) * means.var(ddof=1))
    expected = 2 * stats.t.sf(means.mean() / error, 4)
    assert told_apart(gaps) == pytest.approx(expected, rel=1e-6)
    assert told_apart(gaps[:1]) == 1.0
    assert told_apart(-gaps) == 1.0


def test_the_interval_is_that_of_all_tables():
    """Few clients, which are no sample, have one over splits."""
    gain = gain_of([0.1] * CLIENTS, [0.1] * CLIENTS)._replace(mean=(0.1, 0.05, 0.15))
    assert interval(gain, shifted(0)) == (0.1, 0.05, 0.15)
    gaps = np.array([[0.1, 0.2], [0.12, 0.18], [0.09, 0.22], [0.1, 0.2], [0.11, 0.21]])
    mean, low, high = interval(gain, gaps)
    error = np.sqrt((1 / 5 + 1 / 3) * gaps.mean(axis=1).var(ddof=1))
    assert mean == pytest.approx(gaps.mean())
    ends = stats.t.interval(0.95, 4, loc=mean, scale=error)
    assert (low, high) == pytest.approx(ends)


def test_constant_is_to_be_beaten():
    constant = shifted(0, 5)
    assert beats_constant(shifted(-0.1), constant)
    assert not beats_constant(shifted(0.0, 7), constant)
    assert not beats_constant(shifted(0.1, 8), constant)


def gain_of(value, half):
    value, half = np.asarray(value, float), np.asarray(half, float)
    nothing = np.zeros(len(value), bool)
    return Gain(value, value - half, value + half, nothing, nothing, (0.0, 0.0, 0.0))


def test_who_gains_and_who_is_harmed():
    value = [0.1, -0.5, 0.001, 0.3, np.nan]
    found = gain_of(value, [0.02, 0.1, 0.05, 0.02, np.nan])
    by_split = np.array([value, value])
    judged = np.array([True, True, True, False, True])
    expected = Clients(["a"], ["b"], 1, 2, better=3, measured=4)
    assert judge(found, by_split, list("abcde"), judged) == expected


def test_one_split_harms_nobody():
    found = gain_of([-0.5, 0.5], [0.1, 0.1])
    who = judge(found, np.array([[-0.5, 0.5]]), ["a", "b"], np.array([True, True]))
    assert who.harmed == [] and who.gain == ["b"]


def test_splits_that_disagree_decide_nothing():
    found = gain_of([-0.5], [0.1])
    who = judge(found, np.array([[-1.1], [0.1]]), ["a"], np.array([True]))
    assert who.undecided == 1


def test_many_clients_are_corrected_for():
    """An interval that barely excludes zero is by chance, among a hundred."""
    one, many = gain_of([0.1], [0.095]), gain_of([0.1] * 100, [0.095] * 100)
    assert len(judge(one, np.array([[0.1]]), ["a"], np.array([True])).gain) == 1
    names = [str(n) for n in range(100)]
    assert not judge(many, np.full((1, 100), 0.1), names, np.ones(100, bool)).gain


FOUND = Findings(
    choice=Choice("finetune", "ditto", ["finetune", "ditto"], {}),
    versus_alone="finetune",
    informative=True,
    clients=20,
    splits=5,
    who=Clients(["Meadow"], [], 18, 1, better=15, measured=20),
    shared_harms=["Coastal Clinic"],
    mean_gain=(0.02, 0.01, 0.03),
    p=0.003,
    comparisons=6,
)
SCORES = {"local_only": 0.35, "fedavg": 0.36, "finetune": 0.331, "ditto": 0.33}


def test_three_sentences_name_who_matters():
    what, who, sure = sentences(FOUND, SCORES, "log loss")
    assert what.startswith("Deploy fine-tuned (test log loss 0.331; alone 0.35)")
    assert "Ditto 0.33" in what and "simplest" in what
    assert "better than training alone for 15 of 20 clients" in who
    assert "1 clearly gains (Meadow)" in who and "would harm Coastal Clinic" in who
    assert "0.01 to 0.03" in sure and "correction for 6" in sure
    assert "1 client has too few" in sure


def test_clients_too_small_to_judge_are_not_judged():
    small = FOUND._replace(who=Clients([], [], 0, 20, better=15, measured=20))
    assert "none has enough test rows" in sentences(small, SCORES, "log loss")[1]


def test_alone_is_said_plainly():
    alone = Choice("local_only", "local_only", ["local_only"], {})
    found = FOUND._replace(choice=alone, versus_alone="ditto")
    assert sentences(found, SCORES, "log loss")[0].startswith(
        "Train alone: every federated method is clearly worse"
    )
    like = alone._replace(best="ditto", alike=["local_only", "ditto"])
    what = sentences(found._replace(choice=like), SCORES, "log loss")[0]
    assert what.startswith("Train alone: no federated method is clearly better")


def test_what_time_did_not_allow_is_said():
    cut = ["APFL"], ["FedAvg", "partial"]
    sure = sentences(FOUND, SCORES, "log loss", *cut)[2]
    assert "; there was no time for APFL" in sure
    assert sure.endswith("; more rounds might improve FedAvg and partial.")


def test_noise_is_said_plainly():
    what, *_ = sentences(FOUND._replace(informative=False), SCORES, "log loss")
    assert "Deploy nothing yet" in what and "constant" in what


def test_a_choice_pays_where_the_best_does():
    """FedAvg helps one half and harms the other: it is like both, and no gain."""
    values = {"local_only": shifted(0.05), "finetune": shifted(0, 3)}
    spread = np.where(np.arange(CLIENTS) % 2, 0.15, -0.14)
    values["fedavg"] = shifted(0.04, 2) + spread
    found = choose(values)
    assert "fedavg" in found.alike and found.method == "finetune"


def test_training_alone_that_diverged_is_not_chosen():
    values = {"local_only": shifted(0) * np.inf, "fedavg": shifted(0.3)}
    found = choose(values)
    assert found.method == "fedavg" and found.alike == ["fedavg"]


def test_a_client_whose_model_is_not_finite_counts(tmp_path):
    """An empty cell is a client without rows, or one whose model is ruined."""
    lines = ["seed,test,test_personal_mse", "0,5,", "0,0,", "0,5,0.25"]
    (tmp_path / "clients.csv").write_text("\n".join(lines))
    found = read_values(tmp_path, "test", "mse")
    np.testing.assert_equal(found, [[np.inf, np.nan, 0.25]])


def test_the_simplest_method_is_not_deployed_if_it_does_not_pay():
    choice = Choice("finetune", "ditto", ["fedavg", "finetune", "ditto"], {})
    what = sentences(FOUND._replace(choice=choice), SCORES, "log loss")[0]
    assert "the simplest of those that pay and cannot be told apart (Ditto" in what


@pytest.mark.parametrize(
    ("gain", "p", "said"),
    [
        (
            (0.02, 0.01, 0.03),
            0.003,
            "by 0.02 on average (95 % interval 0.01 to 0.03), clear by",
        ),
        ((0.02, -0.01, 0.05), 0.2, "(95 % interval -0.01 to 0.05), not clear by"),
        ((0.02, -0.01, 0.05), 0.01, "not clear on average, but clear for most clients"),
        (
            (-0.02, -0.05, 0.01),
            0.2,
            "is worse than training alone by 0.02 in test log loss",
        ),
        (
            (-0.02, -0.05, 0.01),
            0.2,
            "(95 % interval -0.01 to 0.05); that it is better is not",
        ),
        ((-0.02, -0.05, 0.01), 0.01, "that most clients gain is clear"),
    ],
)
def test_how_sure_follows_from_the_numbers(gain, p, said):
    found = FOUND._replace(mean_gain=gain, p=p)
    assert said in sentences(found, SCORES, "log loss")[2]
