# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import io
import json

import numpy as np
import pytest
from rich.console import Console

from fedblend.runs.demo import Score, advice, demo
from fedblend.stats.gains import Gain

FEW = np.linspace(-0.01, 0.01, 40)


def sure(value, width=0.0) -> Gain:
    """Gains with intervals of this width on both sides."""
    value, none = np.asarray(value), np.zeros(len(value), bool)
    mean = (value.mean(), value.mean() - width, value.mean() + width)
    return Gain(value, value - width, value + width, none, none, mean)


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory, compiled):
    """What a short demonstration prints, and its folder."""
    out = tmp_path_factory.mktemp("demo") / "runs"
    console = Console(file=io.StringIO(), width=100)
    demo(out, console, rounds=4, seeds=2)
    return console.file.getvalue(), out  # pyright: ignore


@pytest.mark.slow
def test_the_demo_prints_its_numbers_and_what_they_say(small_demo):
    text, out = small_demo
    results = json.loads((out / "results.json").read_text())
    assert set(results["methods"]) == {
        "local-only",
        "FedAvg",
        "fine-tuned",
        "FLIX",
        "APFL",
    }
    for numbers in results["methods"].values():
        assert f"{numbers['mean']:.1%}" in text
        assert 0 <= numbers["worst_tenth"] <= numbers["mean"] <= 1
    assert results["methods"]["local-only"]["bits_per_client"] == 0
    # 650 float32 weights, up and down, 20 of 40 clients, 4 rounds.
    assert results["methods"]["FedAvg"]["bits_per_client"] == 650 * 32 * 2 * 4 / 2
    # FLIX has one message more of everybody, its own model, before the rounds.
    assert results["methods"]["FLIX"]["bits_per_client"] > 650 * 32 * 2 * 4 / 2
    assert results["advice"] in " ".join(text.split())


@pytest.mark.slow
def test_the_sentence_is_that_of_the_written_accuracies(small_demo):
    _, out = small_demo
    results = json.loads((out / "results.json").read_text())
    gains = results["gain_by_client"]
    scores = {
        name: Score(np.array(values), results["methods"][name]["bits_per_client"])
        for name, values in results["accuracy_by_client"].items()
    }
    for name, found in gains.items():
        none = np.zeros(40, bool)
        value, low, high = (np.array(found[end]) for end in ("value", "low", "high"))
        gain = Gain(value, low, high, none, none, (0, 0, 0))
        scores[name] = scores[name]._replace(gain=gain)
    assert results["advice"] == advice(scores)
    for name, score in scores.items():
        numbers = results["methods"][name]
        assert score.accuracy.mean() == pytest.approx(numbers["mean"])
        gap = score.accuracy - scores["local-only"].accuracy
        if name != "local-only":
            np.testing.assert_allclose(gains[name]["value"], gap, atol=1e-6)
            low, high = (np.array(gains[name][end]) for end in ("low", "high"))
            assert (low <= gap + 1e-6).all() and (gap - 1e-6 <= high).all()
            assert numbers["worse_than_local"] == (high < 0).sum()
            assert numbers["better_than_local"] == (low > 0).sum()
            assert numbers["mean_gain_low"] < gap.mean() < numbers["mean_gain_high"]


@pytest.mark.slow
def test_the_demo_writes_its_figures(small_demo):
    _, out = small_demo
    for name in ("accuracy.png", "accuracy.svg", "gains.png", "gains.svg"):
        assert (out / name).stat().st_size > 5000


def test_a_clear_winner_is_named_whatever_it_costs():
    base = {
        "local-only": Score(0.9 + FEW, 0.0),
        "FedAvg": Score(0.8 + FEW, 10.0),
        "APFL": Score(0.7 + FEW, 10.0),
    }
    said = advice(base)
    assert said == "Deploy local-only (90.0%): clearly better than all others."
    said = advice({**base, "APFL": Score(0.95 + FEW, 10.0, sure(0.05 + 0 * FEW))})
    assert said.startswith("Deploy APFL (95.0%): clearly better than all others")
    assert said.endswith("none of the 40 clients would clearly have done better alone.")
    ups = np.where(np.arange(40) < 30, 0.2, -0.1)
    said = advice({**base, "APFL": Score(0.9 + FEW + ups, 10.0, sure(ups))})
    assert said.endswith("10 of the 40 clients would clearly have done better alone.")
    said = advice({**base, "APFL": Score(0.9 + FEW + ups, 10.0, sure(ups, 0.15))})
    assert said.endswith("none of the 40 clients would clearly have done better alone.")


def test_where_methods_are_alike_the_cheapest_is_deployed():
    noise = np.where(np.arange(40) % 2, 0.1, -0.1)
    tied = {
        "local-only": Score(0.5 + FEW, 0.0),
        "FLIX": Score(0.9 + FEW, 12.0, sure(0.4 + 0 * FEW)),
        "APFL": Score(0.901 + noise, 10.0, sure(0.401 + noise)),
    }
    said = advice(tied)
    assert said.startswith("Deploy APFL (90.1%): on 40 clients it cannot be told apart")
    assert "from FLIX (90.0%), and sends the least" in said
    said = advice({**tied, "FLIX": Score(0.9 + FEW, 10.0, sure(0.4 + 0 * FEW))})
    assert "none of them sends less" in said
    said = advice({**tied, "local-only": Score(0.9 + FEW, 0.0)})
    assert said.startswith("Deploy local-only (90.0%)")
