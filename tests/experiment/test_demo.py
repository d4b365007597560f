# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import io
import json

import numpy as np
import pytest
from rich.console import Console

from fedblend.experiment.demo import conclusion, demo

FEW = np.linspace(-0.01, 0.01, 40)


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory, compiled):
    """What a short demonstration prints, and its folder."""
    out = tmp_path_factory.mktemp("demo") / "runs"
    console = Console(file=io.StringIO(), width=100)
    demo(out, console, rounds=4, seeds=2)
    return console.file.getvalue(), out  # pyright: ignore


def test_the_demo_prints_its_numbers_and_what_they_say(small_demo):
    text, out = small_demo
    results = json.loads((out / "results.json").read_text())
    assert set(results["methods"]) == {"local-only", "FedAvg", "fine-tuned"}
    for numbers in results["methods"].values():
        assert f"{numbers['mean']:.1%}" in text
        assert 0 <= numbers["worst_tenth"] <= numbers["mean"] <= 1
    assert results["methods"]["local-only"]["bits_per_client"] == 0
    # 650 float32 weights, both ways, 20 of 40 clients, 4 rounds.
    assert results["methods"]["FedAvg"]["bits_per_client"] == 650 * 32 * 2 * 4 / 2
    assert results["conclusion"] in " ".join(text.split())


def test_the_sentence_is_that_of_the_written_accuracies(small_demo):
    _, out = small_demo
    results = json.loads((out / "results.json").read_text())
    by_client = results["accuracy_by_client"]
    accuracy = {name: np.array(values) for name, values in by_client.items()}
    assert results["conclusion"] == conclusion(accuracy)
    for name, values in accuracy.items():
        assert values.mean() == pytest.approx(results["methods"][name]["mean"])


def test_the_demo_writes_its_figures(small_demo):
    _, out = small_demo
    for name in ("accuracy.png", "accuracy.svg", "gains.png", "gains.svg"):
        assert (out / name).stat().st_size > 5000


def test_a_clear_winner_is_named_whoever_it_is():
    base = {"local-only": 0.9 + FEW, "FedAvg": 0.8 + FEW, "fine-tuned": 0.7 + FEW}
    said = conclusion(base)
    assert said.startswith("local-only (90.0%) serves these clients best, 10.0 points")
    assert "fine-tuned (70.0%) comes last" in said
    assert "40 of the 40 clients would have done better alone" in said
    other = {**base, "fine-tuned": 0.95 + FEW}
    assert conclusion(other).startswith("fine-tuned (95.0%) serves these clients best")
    assert "none of the 40 clients would have done better alone" in conclusion(other)


def test_a_difference_within_the_noise_is_not_a_victory():
    noise = np.where(np.arange(40) % 2, 0.1, -0.1)
    said = conclusion(
        {"local-only": 0.9 + FEW, "FedAvg": 0.5 + FEW, "fine-tuned": 0.901 + noise}
    )
    assert "cannot be told apart on 40 clients" in said
    assert "20 of the 40 clients" in said
