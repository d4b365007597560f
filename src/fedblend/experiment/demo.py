# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The demonstration: is it worth taking part, and in what?

Forty clients hold real handwritten digits, four classes each. Each of them may train
alone, use the shared model of FedAvg, fine-tune that model on its own digits, or mix a
shared model with its own, by FLIX or by APFL. All are tested on the client's own
held-out digits.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from fedblend.data.dataset import federation_of
from fedblend.data.federation import Federation
from fedblend.data.partition import classes_per_client
from fedblend.data.sources import load
from fedblend.experiment.demo_methods import COHORT, METHODS, RUNS, completed
from fedblend.metrics import harm, over_clients
from fedblend.report.alone import briefly, in_full
from fedblend.report.methods import plot_method_gains, plot_methods
from fedblend.report.series import Gains, curves, rows_of
from fedblend.report.terminal import human_bits
from fedblend.runtime.budget import Budget
from fedblend.runtime.run import Run

CLIENTS, CLASSES = 40, 4
TINY = 1e-6
"""Accuracies are averaged over seeds; what differs by less is equal."""
ALONE = "local-only"


class Score(NamedTuple):
    """One method: every client's test accuracy over seeds, and its price in bits."""

    accuracy: np.ndarray
    bits: float


def demo(out: Path, console: Console, *, rounds: int = 100, seeds: int = 3) -> None:
    """Run the demonstration; print a table and what to deploy, write figures.

    Args:
        out: the folder for figures and results.json; made if it is not there.
        console: where to print.
        rounds: of communication; training alone has as many as are best for it.
        seeds: runs to average over; they run side by side.
    """
    begun = time.perf_counter()
    federation = _federation()
    console.print(
        f"{CLIENTS} clients hold {federation.train.total} handwritten digits for "
        f"training, {CLASSES} classes each, and are tested on "
        f"{federation.splits['test'].total} of their own.",
        highlight=False,
    )
    scores, histories = {}, {}
    budget = Budget(None)
    for name, (doing, _) in RUNS.items():
        with console.status(f"{doing} ..."):
            run = completed(name, federation, rounds, seeds)
        budget = run.budget or budget
        for method, of in METHODS.items():
            if of.run == name:
                scores[method], histories[method] = _result(run, of.model)
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
    if choice == ALONE:
        return f"Deploy {said[choice]}: {because}."
    worse = harm(scores[choice].accuracy, scores[ALONE].accuracy, True, TINY).count
    return (
        f"Deploy {said[choice]}: {because}; {worse or 'none'} of the {clients} clients "
        "would have done better alone."
    )


def _apart(best: Score, other: Score) -> bool:
    gap = best.accuracy - other.accuracy
    return bool(gap.mean() > 2 * gap.std(ddof=1) / np.sqrt(len(gap)))


def _federation() -> Federation:
    dataset = load("digits")
    partition = classes_per_client(dataset.rows[1], CLIENTS, CLASSES)
    return federation_of(dataset, partition, test=0.3)


def _result(run: Run, model: str) -> tuple[Score, Any]:
    """The last accuracies of a model, and its curve."""
    values = np.mean([of["test"][model]["accuracy"] for of in run.measured], axis=0)
    costs = [summary["bits"] for summary in run.summary()]
    bits = np.mean([cost["up"] + cost["down"] for cost in costs]) / CLIENTS
    curve = curves(rows_of(run.records), "test", "accuracy")[model]
    return Score(values.astype(np.float64), float(bits)), curve


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
    for heading in ("mean", "worst\ntenth", "better\nthan alone",
                    "worse\nthan alone", "bits sent\na client"):  # fmt: skip
        table.add_column(heading, justify="right")
    for method, numbers in _numbers(scores).items():
        table.add_row(
            method,
            f"{numbers['mean']:.1%}",
            f"{numbers['worst_tenth']:.1%}",
            _clients(numbers["better_than_local"]),
            _clients(numbers["worse_than_local"]),
            human_bits(numbers["bits_per_client"]),
        )
    return table


def _clients(count: int | None) -> str:
    return "-" if count is None else str(count)


def _numbers(scores: dict[str, Score]) -> dict[str, dict[str, Any]]:
    """The table as plain values."""

    def worse(method: str, reference: str) -> int | None:
        if method == reference:
            return None
        pair = scores[method].accuracy, scores[reference].accuracy
        return harm(*pair, True, TINY).count

    spreads = {
        method: over_clients(score.accuracy, np.ones(CLIENTS), True)
        for method, score in scores.items()
    }
    return {
        method: {
            "mean": spreads[method].mean,
            "worst_tenth": spreads[method].worst_tenth,
            "better_than_local": worse(ALONE, method),
            "worse_than_local": worse(method, ALONE),
            "bits_per_client": score.bits,
        }
        for method, score in scores.items()
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
        "advice": sentence,
    }


def _figures(scores, histories, out: Path, seeds: int, budget: dict) -> list[Path]:
    """Accuracy over rounds, and every client's gain over training alone."""
    out.mkdir(parents=True, exist_ok=True)
    alone = scores[ALONE].accuracy
    gaps = {name: score.accuracy - alone for name, score in scores.items()}
    del gaps[ALONE]
    gains = {
        name: Gains(
            np.sort(np.where(abs(gap) < TINY, 0, gap)), "accuracy", "test", "local"
        )
        for name, gap in gaps.items()
    }
    title = f"Digits held by {CLIENTS} clients, {CLASSES} classes each"
    return [
        *plot_methods(
            {_labelled(name, budget): curve for name, curve in histories.items()},
            f"{title}; bands: range of {seeds} seeds",
            out / "accuracy",
        ),
        *plot_method_gains(gains, out / "gains", budget),
    ]


def _labelled(method: str, budget: dict) -> str:
    return f"{method} ({briefly(budget)})" if method == ALONE else method
