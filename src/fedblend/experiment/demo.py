# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The demonstration: is it worth taking part?

Forty clients hold real handwritten digits, two classes each. Each of them may train
alone, use the shared model of FedAvg, or fine-tune that model on its own digits. All
three are tested on the client's own held-out digits.

The rates and the number of fine-tuning steps were chosen on validation rows, a fifth
of every client's training digits, and not on the test digits that are reported.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from fedblend import models, objectives
from fedblend.algorithms import fedavg, finetune, local_only
from fedblend.data.dataset import federation_of
from fedblend.data.federation import Federation
from fedblend.data.partition import classes_per_client
from fedblend.data.sources import load
from fedblend.metrics import harm, over_clients, standard
from fedblend.report.figures import COLOURS
from fedblend.report.methods import plot_method_gains, plot_methods
from fedblend.report.series import Gains, curves, rows_of
from fedblend.report.terminal import human_bits
from fedblend.runtime.run import Run
from fedblend.runtime.simulate import simulate

CLIENTS, CLASSES, COHORT = 40, 2, 20
STEPS, BATCH = 10, 10
ALONE_RATE, SHARED_RATE = 0.3, 1.0
TUNE_RATE, TUNE_STEPS = 0.3, 50
TINY = 1e-6
"""Accuracies are averaged over seeds; what differs by less is equal."""
METHODS = {"local-only": "local", "FedAvg": "shared", "fine-tuned": "personal"}
"""The three methods, by the model that a client uses."""


class Score(NamedTuple):
    """One method: every client's test accuracy over seeds, and its price in bits."""

    accuracy: np.ndarray
    bits: float


def demo(out: Path, console: Console, *, rounds: int = 100, seeds: int = 3) -> None:
    """Run the demonstration; print a table and a conclusion, write figures.

    Args:
        out: the folder for figures and results.json; made if it is not there.
        console: where to print.
        rounds: of communication, or of as much training alone.
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
    with console.status("Every client trains alone ..."):
        alone = _run(federation, rounds, seeds)
    scores["local-only"], histories["local-only"] = _result(alone, "personal")
    _say(console, "local-only", scores, begun)
    with console.status("FedAvg trains a shared model ..."):
        together = _run(federation, rounds, seeds, alone)
    for method, model in list(METHODS.items())[1:]:
        scores[method], histories[method] = _result(together, model)
        _say(console, method, scores, begun)
    figures = _figures(scores, histories, out, seeds)
    sentence = conclusion({name: score.accuracy for name, score in scores.items()})
    console.print(_table(scores, seeds), highlight=False)
    console.print(sentence, highlight=False)
    results = _results(scores, rounds, seeds, time.perf_counter() - begun, sentence)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    names = ", ".join(path.name for path in figures if path.suffix == ".png")
    console.print(f"In {out}: results.json, {names} (and SVG).", highlight=False)


def conclusion(accuracy: dict[str, np.ndarray]) -> str:
    """What the numbers say, in one sentence.

    Methods are compared client by client; a mean difference of less than two standard
    errors over clients counts as none.
    """
    ranked = sorted(accuracy, key=lambda name: -accuracy[name].mean())
    best, second, last = ranked
    said = {name: f"{name} ({values.mean():.1%})" for name, values in accuracy.items()}
    clients = len(accuracy[best])
    gap = accuracy[best] - accuracy[second]
    if gap.mean() > 2 * gap.std(ddof=1) / np.sqrt(clients):
        verdict = (
            f"{said[best]} serves these clients best, {100 * gap.mean():.1f} points "
            f"ahead of {said[second]}"
        )
    else:
        verdict = (
            f"{said[best]} and {said[second]} cannot be told apart on {clients} clients"
        )
    worse = harm(accuracy["fine-tuned"], accuracy["local-only"], True, TINY).count
    return (
        f"{verdict}, {said[last]} comes last, and {worse or 'none'} of the {clients} "
        "clients would have done better alone than fine-tuned."
    )


def _federation() -> Federation:
    dataset = load("digits")
    partition = classes_per_client(dataset.rows[1], CLIENTS, CLASSES)
    return federation_of(dataset, partition, test=0.3)


def _run(
    federation: Federation, rounds: int, seeds: int, alone: Run | None = None
) -> Run:
    """Training alone; or, compared with it, FedAvg whose model is then fine-tuned."""
    model = models.build("softmax", (8, 8, 1), 10)
    loss = objectives.cross_entropy(model.apply)
    algorithm = local_only(loss, ALONE_RATE, steps=STEPS, batch_size=BATCH)
    if alone is not None:
        shared = fedavg(loss, SHARED_RATE, steps=STEPS, batch_size=BATCH)
        algorithm = finetune(
            shared, loss, TUNE_RATE, steps=TUNE_STEPS, batch_size=BATCH
        )
    return simulate(
        algorithm,
        model.init(jax.random.key(0)),
        federation,
        jax.random.split(jax.random.key(0), seeds),
        rounds=rounds,
        cohort=CLIENTS if alone is None else COHORT,
        measure=standard("classes", loss, model.apply),
        splits=["test"],
        local=alone,
    ).complete()


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
    for heading in ("mean", "worst tenth", "worse than\nalone",
                    "worse than\nFedAvg", "bits sent\na client"):  # fmt: skip
        table.add_column(heading, justify="right")
    for method, numbers in _numbers(scores).items():
        table.add_row(
            method,
            f"{numbers['mean']:.1%}",
            f"{numbers['worst_tenth']:.1%}",
            _clients(numbers["worse_than_local"]),
            _clients(numbers["worse_than_shared"]),
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
            "worse_than_local": worse(method, "local-only"),
            "worse_than_shared": worse(method, "FedAvg"),
            "bits_per_client": score.bits,
        }
        for method, score in scores.items()
    }


def _results(scores, rounds: int, seeds: int, seconds: float, sentence: str) -> dict:
    return {
        "clients": CLIENTS,
        "classes_per_client": CLASSES,
        "cohort": COHORT,
        "rounds": rounds,
        "seeds": seeds,
        "seconds": round(seconds, 2),
        "methods": _numbers(scores),
        "accuracy_by_client": {m: s.accuracy.tolist() for m, s in scores.items()},
        "conclusion": sentence,
    }


def _figures(scores, histories, out: Path, seeds: int) -> list[Path]:
    """Accuracy over rounds, and every client's gain over training alone."""
    out.mkdir(parents=True, exist_ok=True)
    alone = scores["local-only"].accuracy
    gaps = {name: score.accuracy - alone for name, score in scores.items()}
    del gaps["local-only"]
    gains = {
        name: Gains(
            np.sort(np.where(abs(gap) < TINY, 0, gap)), "accuracy", "test", "local"
        )
        for name, gap in gaps.items()
    }
    title = f"Digits held by {CLIENTS} clients, {CLASSES} classes each"
    lines = {name: (histories[name], COLOURS[model]) for name, model in METHODS.items()}
    return [
        *plot_methods(
            lines, f"{title}; bands: range of {seeds} seeds", out / "accuracy"
        ),
        *plot_method_gains(gains, out / "gains"),
    ]
