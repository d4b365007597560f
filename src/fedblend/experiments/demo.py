# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The demonstration: is it worth taking part, and in what?

Forty clients hold real handwritten digits, four classes each. Each of them may train
alone, use the shared model of FedAvg, fine-tune that model on its own digits, or mix a
shared model with its own, by FLIX or by APFL. All are tested on the client's own
held-out digits; every seed holds out others.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from fedblend.data.dataset import federation_of
from fedblend.data.datasets import load
from fedblend.data.federated import FederatedData
from fedblend.data.partition.partitioners import classes_per_client
from fedblend.experiments.demo_methods import COHORT, METHODS, RUNS, completed
from fedblend.gains import Evidence, Gain, gain_summary
from fedblend.metrics import over_clients
from fedblend.report.alone import briefly, in_full
from fedblend.report.methods import plot_method_gains, plot_methods
from fedblend.report.series import Gains, curves, rows_of
from fedblend.report.terminal import human_bits
from fedblend.simulation.early_stopping import Budget
from fedblend.simulation.run import Run

CLIENTS, CLASSES = 40, 4
ALONE = "local-only"


class Score(NamedTuple):
    """One method: every client's test accuracy over seeds, and its price in bits.

    ``gain`` is over training alone, None of that itself.
    """

    accuracy: np.ndarray
    bits: float
    gain: Gain | None = None


def demo(out: Path, console: Console, *, rounds: int = 100, seeds: int = 3) -> None:
    """Run the demonstration; print a table and what to deploy, write figures.

    Args:
        out: the folder for figures and results.json; made if it is not there.
        console: where to print.
        rounds: of communication; training alone has as many as are best for it.
        seeds: runs to average over; they run side by side.
    """
    begun = time.perf_counter()
    splits = _splits(seeds)
    federated_data = splits[0]
    console.print(
        f"{CLIENTS} clients hold {federated_data.train.total} handwritten digits for "
        f"training, {CLASSES} classes each, and are tested on "
        f"{federated_data.splits['test'].total} of their own.",
        highlight=False,
    )
    scores, histories, runs = {}, {}, {}
    budget = Budget(None)
    for name, (doing, _) in RUNS.items():
        with console.status(f"{doing} ..."):
            runs[name] = completed(name, splits, rounds)
        budget = runs[name].budget or budget
        for method, of in METHODS.items():
            if of.run == name:
                scores[method], histories[method] = _result(runs, *of)
                _say(console, method, scores, begun)
    alone = budget._asdict()
    figures = _figures(scores, histories, out, seeds, alone)
    sentence = advice(scores)
    console.print(_table(scores, seeds), highlight=False)
    console.print(f"{ALONE}: {in_full(alone)}.", highlight=False)
    console.print(sentence, highlight=False)
    seconds = time.perf_counter() - begun
    results = _results(scores, rounds, seeds, seconds, sentence, alone)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    names = ", ".join(path.name for path in figures if path.suffix == ".png")
    console.print(f"In {out}: results.json, {names} (and SVG).", highlight=False)


def advice(scores: dict[str, Score]) -> str:
    """What to deploy, in one sentence.

    Methods are compared client by client; a mean difference of less than two standard
    errors over clients counts as none, and then fewer bits decide.
    """
    said = {name: f"{name} ({of.accuracy.mean():.1%})" for name, of in scores.items()}
    best = max(scores, key=lambda name: scores[name].accuracy.mean())
    alike = [name for name in scores if not _apart(scores[best], scores[name])]
    choice = min(
        alike, key=lambda name: (scores[name].bits, -scores[name].accuracy.mean())
    )
    clients = len(scores[choice].accuracy)
    others = ", ".join(said[name] for name in alike if name != choice)
    because = "clearly better than all others"
    if others:
        because = f"on {clients} clients it cannot be told apart from {others}, and "
        cheaper = all(
            scores[name].bits > scores[choice].bits for name in alike if name != choice
        )
        because += "sends the least" if cheaper else "none of them sends less"
    gain = scores[choice].gain
    if gain is None:
        return f"Deploy {said[choice]}: {because}."
    worse = gain_summary(gain).count
    return (
        f"Deploy {said[choice]}: {because}; {worse or 'none'} of the {clients} clients "
        "would clearly have done better alone."
    )


def _apart(best: Score, other: Score) -> bool:
    gap = best.accuracy - other.accuracy
    return bool(gap.mean() > 2 * gap.std(ddof=1) / np.sqrt(len(gap)))


def _splits(seeds: int) -> list[FederatedData]:
    """The same clients, with other digits held out for every seed."""
    dataset = load("digits")
    partition = classes_per_client(dataset.rows[1], CLIENTS, CLASSES)
    return [
        federation_of(dataset, partition, test=0.3, split=seed) for seed in range(seeds)
    ]


def _result(runs: dict[str, Run], name: str, model: str) -> tuple[Score, Any]:
    """The last accuracies of a model, and its curve."""
    run, alone = runs[name], runs["alone"]
    values = np.mean([of["test"][model]["accuracy"] for of in run.measured], axis=0)
    costs = [summary["bits"] for summary in run.summary()]
    bits = np.mean([cost["up"] + cost["down"] for cost in costs]) / CLIENTS
    curve = curves(rows_of(run.records), "test", "accuracy")[model]
    gain = None if run is alone else _gain(run, model, alone)
    return Score(values.astype(np.float64), float(bits), gain), curve


def _gain(run: Run, model: str, alone: Run) -> Gain:
    """What every client gains by a model of a run over training alone."""

    def paired(own: Any, other: Any) -> list[Any]:
        return [
            {
                "test": {
                    "personal": mine["test"][model],
                    "local": theirs["test"]["personal"],
                }
            }
            for mine, theirs in zip(own, other, strict=True)
        ]

    measured = paired(run.measured, alone.measured)
    by_row = paired(run.by_row, alone.by_row)
    evidence = Evidence(measured, by_row, run.evidence.counts, run.evidence.metrics)
    return evidence.gain("test", "accuracy", "local")


def _say(console: Console, method: str, scores: dict[str, Score], begun: float) -> None:
    seconds = time.perf_counter() - begun
    mean = scores[method].accuracy.mean()
    console.print(
        f"{seconds:5.1f} s  {method}: {mean:.1%} of test digits right", highlight=False
    )


def _table(scores: dict[str, Score], seeds: int) -> Table:
    table = Table(
        title=f"Test accuracy over {CLIENTS} clients, mean of {seeds} seeds",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("model")
    for heading in ("mean", "worst\ntenth", "gain over alone\n(95 % interval)",
                    "better", "worse", "bits sent\na client"):  # fmt: skip
        table.add_column(heading, justify="right")
    for method, numbers in _numbers(scores).items():
        table.add_row(
            method,
            f"{numbers['mean']:.1%}",
            f"{numbers['worst_tenth']:.1%}",
            *_compared(numbers),
            human_bits(numbers["bits_per_client"]),
        )
    return table


def _compared(numbers: dict[str, Any]) -> list[str]:
    """The mean gain over training alone, and how many are better and worse off."""
    if numbers["mean_gain"] is None:
        return ["-"] * 3
    mean, low, high = (
        100 * numbers[f"mean_gain{end}"] for end in ("", "_low", "_high")
    )
    interval = f"{mean:+.1f} ({low:+.1f}, {high:+.1f})"
    counts = (numbers[f"{way}_than_local"] for way in ("better", "worse"))
    return [interval, *map(str, counts)]


def _numbers(scores: dict[str, Score]) -> dict[str, dict[str, Any]]:
    """The table as plain values; clients are better or worse off by their intervals."""
    counted = {
        method: None if score.gain is None else gain_summary(score.gain)
        for method, score in scores.items()
    }
    spreads = {
        method: over_clients(score.accuracy, np.ones(CLIENTS), True)
        for method, score in scores.items()
    }
    return {
        method: {
            "mean": spreads[method].mean,
            "worst_tenth": spreads[method].worst_tenth,
            "better_than_local": found and found.helped,
            "worse_than_local": found and found.count,
            "mean_gain": found and found.mean_gain,
            "mean_gain_low": found and found.mean_gain_low,
            "mean_gain_high": found and found.mean_gain_high,
            "bits_per_client": score.bits,
        }
        for method, score in scores.items()
        for found in (counted[method],)
    }


def _results(
    scores, rounds: int, seeds: int, seconds: float, sentence: str, alone: dict
) -> dict:
    return {
        "clients": CLIENTS,
        "classes_per_client": CLASSES,
        "cohort": COHORT,
        "rounds": rounds,
        "alone": alone,
        "seeds": seeds,
        "seconds": round(seconds, 2),
        "methods": _numbers(scores),
        "accuracy_by_client": {m: s.accuracy.tolist() for m, s in scores.items()},
        "gain_by_client": {
            method: {
                "value": score.gain.value.tolist(),
                "low": score.gain.low.tolist(),
                "high": score.gain.high.tolist(),
            }
            for method, score in scores.items()
            if score.gain is not None
        },
        "advice": sentence,
    }


def _figures(scores, histories, out: Path, seeds: int, budget: dict) -> list[Path]:
    """Accuracy over rounds, and every client's gain over training alone."""
    out.mkdir(parents=True, exist_ok=True)
    gains = {
        name: Gains(score.gain, "accuracy", "test", "local", seeds)
        for name, score in scores.items()
        if score.gain is not None
    }
    title = f"Digits held by {CLIENTS} clients, {CLASSES} classes each"
    return [
        *plot_methods(
            {_labeled(name, budget): curve for name, curve in histories.items()},
            f"{title}; bands: range of {seeds} seeds",
            out / "accuracy",
        ),
        *plot_method_gains(gains, out / "gains", budget),
    ]


def _labeled(method: str, budget: dict) -> str:
    return f"{method} ({briefly(budget)})" if method == ALONE else method
