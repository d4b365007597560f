# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict says what the numbers say, and no more."""

from typing import Any

import pytest

from fedblend.report.verdict import Headline, sentences, several_sentences
from fedblend.stats.gains import GainSummary

SURE = GainSummary(0, 0.0, 0.0, 0.0, 1, 9, 10, 0, 0, 0, 10, 0.05, 0.02, 0.08)


def summary(gain: GainSummary | None, personal: float = 0.9, seeds: int = 2) -> Any:
    def spread(mean: float) -> dict[str, float]:
        return {"mean": mean, "worst": mean - 0.1, "best": mean + 0.05}

    models = {"personal": {"accuracy": spread(personal)}}
    models["local"] = {"accuracy": spread(0.85)}
    than = {} if gain is None else {"than_local": gain._asdict()}
    runs = [{"measures": {"test": models}} for _ in range(seeds)]
    return {"runs": runs, "harmed": {"test": {"accuracy": than}}}


def test_a_clear_gain_pays():
    tone, lines = sentences(summary(SURE), None)
    assert tone == "good"
    assert lines[0] == "Taking part pays on average."
    assert lines[1] == (
        "On test rows accuracy is 90.0 % on average, against 85.0 % by training "
        "alone: a gain of 5.0 points (95 % interval: 2.0 to 8.0 points)."
    )
    assert lines[2].startswith("Of 10 clients, 9 are clearly better off and none is")
    assert "2 repeated runs" in lines[-1]


def test_a_gain_that_harms_some_is_mixed():
    gain = SURE._replace(count=2, helped=8, mean_loss=0.1, worst=0.15)
    tone, lines = sentences(summary(gain), None)
    assert tone == "mixed" and "not for everyone" in lines[0]
    assert any(
        "lose 10.0 points on average, 15.0 points at worst" in line for line in lines
    )


def test_a_clear_loss_does_not_pay():
    gain = SURE._replace(mean_gain=-0.05, mean_gain_low=-0.08, mean_gain_high=-0.02)
    tone, lines = sentences(summary(gain, 0.8), None)
    assert tone == "bad" and lines[0] == "Taking part does not pay."
    assert "a loss of 5.0 points (95 % interval: 2.0 to 8.0 points)" in lines[1]


@pytest.mark.parametrize(("mean", "word"), [(0.01, "gain"), (-0.01, "loss")])
def test_an_interval_around_zero_is_not_clear(mean: float, word: str):
    gain = SURE._replace(mean_gain=mean, mean_gain_low=-0.03, mean_gain_high=0.05)
    tone, lines = sentences(summary(gain), None)
    assert tone == "open" and lines[0] == "It is not clear whether taking part pays."
    assert f"a {word} of 1.0 points" in lines[1]


def test_without_training_alone_nothing_is_claimed():
    tone, lines = sentences(summary(None), None)
    assert tone == "open" and "not known" in lines[0]


def head(personal: float, gain: GainSummary | None = SURE) -> Headline:
    return Headline(
        "test", "accuracy", True, {"personal": personal, "local": 0.8}, "local", gain
    )


@pytest.mark.parametrize(
    ("sure", "words"), [(True, "clear of chance"), (False, "may be chance")]
)
def test_the_best_run_is_named_with_how_sure_that_is(sure: bool, words: str):
    pair = {"run": "b", "other": "a", "low": -0.05, "high": -0.01, "significant": sure}
    tone, lines = several_sentences({"b": head(0.85), "a": head(0.88)}, [pair])
    assert tone == "good" and lines[0].startswith("Best on average: a, accuracy 88.0 %")
    assert lines[1].startswith(
        "Next is b, 3.0 points behind (95 % interval: 1.0 to 5.0"
    )
    assert words in lines[1]


@pytest.mark.parametrize(("sure", "tone"), [(True, "good"), (False, "open")])
def test_a_gain_among_many_comparisons_is_corrected(sure: bool, tone: str):
    alone = {"run": "a", "other": "training alone", "significant": sure}
    found, lines = several_sentences({"b": head(0.85), "a": head(0.88)}, [alone, alone])
    assert found == tone
    assert lines[2].startswith("Taking part pays" if sure else "It is not clear")
    assert ("that may be chance" in lines[2]) is not sure
