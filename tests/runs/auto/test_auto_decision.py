# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The rule that decides, and the sentences that say it."""

import re
from importlib import resources

import numpy as np
import pytest
from scipy import stats

from fedblend.runs.auto import candidates
from fedblend.runs.auto.candidates import BY_NAME
from fedblend.runs.auto.kept_runs import count_affordable, distance_warning
from fedblend.runs.auto.sentences import no_verdict, sentences
from fedblend.runs.auto.verdict import (
    Gainers,
    MethodScores,
    choose,
    clearly_above,
    decide,
    detectable,
    find_untrained,
    interval,
    who_gains,
)

CLIENTS, SPLITS = 20, 10
NAMES = [f"site {number}" for number in range(CLIENTS)]
ALL = np.ones(CLIENTS, bool)


def scores(mean, seed, spread=0.01, clients=CLIENTS, splits=SPLITS):
    draw = np.random.default_rng(seed)
    own = draw.normal(0, spread, clients)
    each = mean + own + draw.normal(0, spread, (2, splits, clients))
    return MethodScores(*each)


CONSTANTS = [scores(0.70, 90), scores(0.68, 91)]


def found(**means):
    every = {
        name: value if isinstance(value, MethodScores) else scores(value, place)
        for place, (name, value) in enumerate(means.items())
    }
    return decide(every, CONSTANTS, NAMES, ALL)


def said(of, **means):
    return sentences(of, means, "log loss")


def test_a_clear_gain_is_deployed():
    means = {"local_only": 0.5, "fedavg": 0.4, "own_intercepts": 0.399, "flix": 0.45}
    of = found(**means)
    assert of.choice.method == "fedavg" and of.answer == "together"
    assert of.choice.alike == ["fedavg", "own_intercepts"] and of.p < 0.001
    what, who, _ = said(of, **means)
    assert what.startswith("Deploy FedAvg: it is clearly better than training alone")
    assert "as good (own intercepts 0.399)." in who and "FLIX" not in who


def test_more_methods_do_not_change_the_question():
    """Seven comparisons were corrected for; now the one that decides is asked once."""
    alone, together = scores(0.5, 0, 0.03), scores(0.48, 1, 0.03)
    few = found(local_only=alone, own_intercepts=together)
    many = found(
        local_only=alone,
        own_intercepts=together,
        fedavg=0.6,
        hierarchical=0.61,
        flix=0.6,
    )
    assert few.p == many.p and few.choice.method == many.choice.method


def test_alone_where_it_is_clearly_better():
    of = found(local_only=0.4, fedavg=0.5)
    assert of.choice.method == "local_only" and of.answer == "alone"
    what, _, sure = said(of, local_only=0.4, fedavg=0.5)
    assert "FedAvg, is clearly worse" in what and "worsens" in sure


def test_what_is_not_clear_is_not_deployed_and_the_power_is_said():
    of = found(local_only=scores(0.5, 0, 0.1), fedavg=scores(0.49, 1, 0.1))
    assert of.choice.method == "local_only" and of.answer == "open"
    what, _, sure = said(of, local_only=0.5, fedavg=0.49)
    assert "is not clearly better" in what and "four times out of five" in sure


def test_what_is_likely_is_deployed_and_said_to_be_no_more():
    gain, spread = 0.03, 0.1
    for seed in range(20):
        alone, other = scores(0.5, seed, spread), scores(0.5 - gain, 50 + seed, spread)
        of = found(local_only=alone, fedavg=other)
        if 0.05 < of.p < 0.25 and of.mean_gain[0] > 0.02:
            assert of.answer == "likely" and of.choice.method == "fedavg"
            what, _, sure = said(of, local_only=0.5, fedavg=0.47)
            assert "is likely better" in what and "clearly better" not in what
            assert "too small to show clearly" in what
            assert "four times out of five" in sure
            return
    raise AssertionError("no seed is likely")


def test_most_clients_are_said_to_gain_only_where_they_do():
    """One of four gains much: over splits that is clear, and not for most clients."""
    shift = 0.0383 * np.arange(-1, 2)[:, None]
    gains = np.array([0.5, -0.03, -0.03, -0.03]) + shift
    alone, constant = np.ones((2, 3, 4)), 3 + shift + np.zeros((2, 3, 4))
    both = {"local_only": alone, "fedavg": alone - gains}
    every = {name: MethodScores(*of) for name, of in both.items()}
    of = decide(every, [MethodScores(*constant)], NAMES[:4], ALL[:4])
    assert of.answer == "together" and of.p < 0.05 and of.mean_gain[1] < 0
    assert (of.who.better, of.who.measured) == (1, 4)
    what, *_ = said(of, local_only=1.0, fedavg=0.9)
    assert "clearly better" in what and "most clients" not in what


def test_a_negligible_gain_is_not_deployed_however_sure():
    alone = scores(0.4, 0, 1e-5)
    of = found(local_only=alone, fedavg=MethodScores(*(one - 1e-3 for one in alone)))
    assert of.answer == "negligible" and of.choice.method == "local_only"


def test_nothing_is_deployed_where_a_constant_is_as_good():
    means = {"local_only": 0.69, "fedavg": 0.681}
    of = found(**means)
    assert not of.informative
    assert said(of, **means)[0].startswith(
        "Deploy nothing yet: FedAvg, the best method on validation rows, does"
    )


def test_the_power_is_that_of_a_simulation():
    """A true gain of the size that is said is found four times out of five."""
    draw, rounds = np.random.default_rng(0), 400
    gaps = draw.normal(0, 1, (1, 40))
    size = detectable(gaps) / gaps.std(ddof=1)
    hits = [
        clearly_above(size + draw.normal(0, 1, (1, 40))) < 0.05 for _ in range(rounds)
    ]
    assert 0.7 < np.mean(hits) < 0.9


def test_false_alarms_are_as_rare_as_promised():
    draw = np.random.default_rng(0)
    for clients in (4, 30):
        hits = []
        for _ in range(400):
            # Splits share the clients' rows, so they depend on each other.
            common = draw.normal(0, 1, (1, clients))
            gaps = np.sqrt(0.2) * common + np.sqrt(0.8) * draw.normal(
                0, 1, (10, clients)
            )
            hits.append(clearly_above(gaps) < 0.05)
        assert np.mean(hits) <= 0.08


@pytest.mark.parametrize("broken", [np.inf, np.nan, 1e9])
def test_what_is_not_trained_is_named_and_not_compared(broken):
    every = {"local_only": scores(0.5, 0), "fedavg": scores(0.4, 1)}
    every["flix"] = MethodScores(*(one + broken for one in scores(0.3, 2)))
    reasons = find_untrained(every, CONSTANTS)
    assert [*reasons] == ["flix"]
    trained = {name: of for name, of in every.items() if name not in reasons}
    of = decide(trained, CONSTANTS, NAMES, ALL)
    means = {"local_only": 0.5, "fedavg": 0.4}
    what, *_ = sentences(of, means, "log loss", failed=reasons)
    assert "FLIX is not trained" in what and of.choice.method == "fedavg"


def test_one_client_that_is_not_finite_is_enough():
    ruined = scores(0.4, 1)
    ruined.test[3, 7] = np.inf
    assert "fedavg" in find_untrained({"fedavg": ruined}, CONSTANTS)


def test_without_training_alone_there_is_no_verdict():
    (what,) = no_verdict({"local_only": "its models are not finite"})
    assert what.startswith("No verdict: local only is not trained")


def test_no_sentence_has_a_number_that_is_none():
    """Few clients, few splits, clients without rows: no inf, nan or 0 of 0."""
    for clients, splits in ((2, 2), (3, 10), (12, 3)):
        every = {
            name: scores(mean, place, clients=clients, splits=splits)
            for place, (name, mean) in enumerate([("local_only", 0.5), ("fedavg", 0.4)])
        }
        for of in every.values():
            of.test[:, -1] = np.nan
        constants = [scores(0.7, 9, clients=clients, splits=splits)]
        judged = np.zeros(clients, bool)
        of = decide(every, constants, NAMES[:clients], judged)
        text = " ".join(said(of, local_only=0.5, fedavg=0.4))
        assert not re.search(r"\binf\b|\bnan\b|0 of 0", text), text


def test_two_clients_are_compared_over_splits():
    """The corrected resampled t test, written out with scipy."""
    gaps = np.array([[0.1, 0.2], [0.12, 0.18], [0.09, 0.22], [0.1, 0.2], [0.11, 0.21]])
    means = gaps.mean(axis=1)
    error = np.sqrt((1 / 5 + 0.2 / 0.8) * means.var(ddof=1))
    expected = stats.t.sf(means.mean() / error, 4)
    assert clearly_above(gaps) == pytest.approx(expected, rel=1e-6)
    assert clearly_above(gaps[:1]) == 0.5
    assert clearly_above(-gaps) == 1.0
    middle, low, high = interval(gaps)
    ends = stats.t.interval(0.95, 4, loc=means.mean(), scale=error)
    assert (middle, low, high) == pytest.approx((means.mean(), *ends))


def test_one_unlike_client_does_not_hide_the_others():
    """It makes the spread of a mean wide; the signed ranks do not see it."""
    gaps = scores(0.1, 0).test
    gaps[:, 7] += 5
    assert clearly_above(gaps) < 0.001 and interval(gaps)[1] < 0


def test_who_gains_and_who_is_harmed():
    draw = np.random.default_rng(0)
    gaps = np.array([0.1, -0.5, 0.001, 0.3, np.nan]) + draw.normal(0, 0.01, (10, 5))
    judged = np.array([True, True, True, False, True])
    expected = Gainers(["a"], ["b"], undecided=1, small=2, better=3, measured=4)
    assert who_gains(gaps, list("abcde"), judged) == expected


def test_a_client_whose_name_is_a_number_is_no_number_of_clients():
    """It would harm 16: these could be 16 clients."""
    means = {"local_only": 0.5, "fedavg": 0.4, "own_intercepts": 0.3}
    of = found(**means)._replace(shared_harms=["16"])
    _, who, _ = said(of, **means)
    assert "would harm client 16" in who


def test_many_clients_are_corrected_for():
    """One client with p = 0.02 gains; a hundred such may do so by chance."""
    noise = np.tile([1.0, -1.0], 5)
    error = noise.std(ddof=1) * np.sqrt(1 / 10 + 0.2 / 0.8)
    gaps = (noise + stats.t.isf(0.01, 9) * error)[:, None]
    assert who_gains(gaps, ["a"], np.ones(1, bool)).gain == ["a"]
    names = [str(number) for number in range(100)]
    assert not who_gains(np.repeat(gaps, 100, 1), names, np.ones(100, bool)).gain


def test_the_simplest_of_those_like_the_best():
    """A quarter of a percent of the gain over a constant is nothing."""
    means = {"fedavg": 0.44, "own_intercepts": 0.4005, "hierarchical": 0.4}
    means["flix"] = 0.402
    exact = {name: scores(mean, 3).validation for name, mean in means.items()}
    best, alike = choose(exact, constant=0.7)
    assert best == "hierarchical" and alike == ["own_intercepts", "hierarchical"]


@pytest.mark.parametrize(("worse", "constant"), [(0.404, 0.7), (0.404, 0.42)])
def test_what_may_be_chance_is_as_good_unless_it_is_much(worse, constant):
    best = scores(0.4, 3).validation
    other = scores(worse, 4, spread=0.1).validation
    other += worse - other.mean()
    found = choose({"fedavg": other, "flix": best}, constant)[1]
    assert found == (["fedavg", "flix"] if constant == 0.7 else ["flix"])


def test_what_there_was_no_time_for_is_in_the_first_sentence():
    of = found(local_only=0.5, fedavg=0.4)
    means = {"local_only": 0.5, "fedavg": 0.4}
    what, *_ = sentences(of, means, "log loss", ["hierarchical", "FLIX"])
    assert "There was no time for hierarchical and FLIX" in what


def test_the_verdict_and_the_table_of_runs_say_how_clients_are_judged():
    """One judges all clients together, the other each by itself: two counts."""
    means = {"local_only": 0.5, "fedavg": 0.4}
    of = found(**means)
    _, who, _ = said(of, **means)
    assert f"of {len(NAMES)} judged together, at a risk of 5 %" in who
    template = resources.files("fedblend.report.page") / "template" / "sections.js"
    assert "Better / worse off, each by itself" in template.read_text()


def first_splits(of, splits):
    return MethodScores(of.validation[:splits], of.test[:splits])


def test_fewer_splits_are_compared_with_the_same_ones_of_others():
    """Two easy splits do not make a method better than it is in them."""
    easy = np.repeat([-0.3, 0.0], [2, SPLITS - 2])[:, None]
    alone = MethodScores(*(one + easy for one in scores(0.5, 0)))
    fedavg = MethodScores(*(one + easy for one in scores(0.4, 1)))
    flix = first_splits(MethodScores(*(one + easy for one in scores(0.42, 2))), 2)
    of = found(local_only=alone, fedavg=fedavg, flix=flix)
    assert of.choice.best == "fedavg" and of.choice.candidate == "fedavg"
    flix = first_splits(MethodScores(*(one + easy for one in scores(0.3, 2))), 2)
    of = found(local_only=alone, fedavg=fedavg, flix=flix)
    assert of.choice.candidate == "flix" and of.splits == 2
    assert of.mean_gain[0] == pytest.approx(0.2, abs=0.02)


def test_a_reference_is_no_candidate(monkeypatch):
    reference = BY_NAME["flix"]._replace(model="reference")
    monkeypatch.setitem(BY_NAME, "flix", reference)
    of = found(local_only=0.5, fedavg=0.4, flix=0.1)
    assert of.choice.best == "fedavg" and of.choice.candidate == "fedavg"


def test_kept_runs_have_the_splits_that_there_is_time_for(tmp_path):
    request = candidates.Request(tmp_path / "table.csv", "site", "outcome")
    configs = [
        candidates.configuration(request, name, BY_NAME[name].first, seeds=[0])
        for name in ("local_only", "own_intercepts")
    ]
    seen = {"clients": 200, "rows": 2000, "entries": 130}
    few, more = (count_affordable(configs, seen, left) for left in (130.0, 250.0))
    assert few < more <= 2 * few + 1 and count_affordable(configs, seen, 0.0) == 0
    assert count_affordable(configs, seen | {"entries": 13}, 60.0) > 100


def test_a_kept_run_that_is_not_there_yet_is_warned_about():
    measures = {"test": {"personal": {"log_loss": {"mean": 0.52}}}}
    summary = {"runs": [{"measures": measures}]}
    near, far = (
        distance_warning(summary, "log_loss", "flix", tested, 300)
        for tested in (0.523, 0.51)
    )
    assert near is None
    assert far is not None and "0.52 after 300 rounds" in far and "0.51" in far
