# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The demonstration: five methods compared on handwritten digits.

Forty clients hold real digits, four classes each. Each client may train alone, use the
shared model of FedAvg, fine-tune that model on its own digits, or mix a shared model
with its own by FLIX or APFL. All models are tested on the client's own held-out digits;
every seed holds out others. Rates and weights were chosen on validation rows, a fifth
of every client's training digits, never on the test digits.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import fedblend as fb
from fedblend.core import Loss
from fedblend.report.figures import plot_method_gains, plot_methods
from fedblend.report.measures import (
    Comparison,
    Curve,
    curves,
    rounds_alone,
    rows_of,
    training_alone,
)
from fedblend.report.terminal import human_bits
from fedblend.stats.gains import Gain, Measured, gain_summary

CLIENTS, CLASSES, COHORT = 40, 4, 20
ALONE = "local-only"
HEADINGS = (
    "mean",
    "worst\ntenth",
    "gain over alone\n(95 % interval)",
    "better",
    "worse",
    "bits sent\na client",
)
GAIN = ("value", "low", "high")
"""A gain over training alone, and the ends of its interval."""
SLOW = fb.Work(0.3, steps=10, batch_size=10)
FAST = SLOW._replace(optimizer=1.0)
"""The local work of a round, at two rates."""


class Method(NamedTuple):
    """A run, and which of its models a client uses."""

    run: str
    model: str


METHODS = {
    ALONE: Method("alone", "personal"),
    "FedAvg": Method("FedAvg", "shared"),
    "fine-tuned": Method("FedAvg", "personal"),
    "FLIX": Method("FLIX", "personal"),
    "APFL": Method("APFL", "personal"),
}


def _alone(loss: Loss) -> Callable[[Any], fb.Algorithm]:
    return lambda factor: fb.local_only(loss, SLOW._replace(optimizer=0.3 * factor))


def _fedavg(loss: Loss) -> fb.Algorithm:
    return fb.finetune(fb.fedavg(loss, FAST), loss, SLOW._replace(steps=50))


def _flix(loss: Loss) -> fb.Algorithm:
    own = fb.solvers.lbfgs(fb.losses.l2(loss, 1e-2), tolerance=1e-4, most=200)
    return fb.flix(loss, lambda mixed: fb.fedavg(mixed, FAST), alpha=0.75, local=own)


def _apfl(loss: Loss) -> fb.Algorithm:
    return fb.apfl(loss, SLOW, alpha=0.75, alpha_rate=0.001, held_out=0.2)


RUNS: dict[str, tuple[str, Callable[[Loss], Any]]] = {
    "alone": ("Every client trains alone", _alone),
    "FedAvg": ("FedAvg trains a shared model, clients fine-tune it", _fedavg),
    "FLIX": ("FLIX mixes a shared model with the clients' own", _flix),
    "APFL": ("APFL learns both, and how to mix them", _apfl),
}
"""The text shown while a run goes on, and its algorithm."""


class Score(NamedTuple):
    """One method: each client's test accuracy, mean over seeds, and bits per client.

    ``gain`` is over training alone, None for training alone itself.
    """

    accuracy: np.ndarray
    bits: float
    gain: Gain | None = None

    def numbers(self) -> dict[str, Any]:
        """The line of the table; intervals decide who is better or worse off."""
        spread = fb.metrics.over_clients(
            self.accuracy, np.ones(len(self.accuracy)), True
        )
        found = None if self.gain is None else gain_summary(self.gain)
        return {
            "mean": spread.mean,
            "worst_tenth": spread.worst_tenth,
            "better_than_local": found and found.helped,
            "worse_than_local": found and found.count,
            "mean_gain": found and found.mean_gain,
            "mean_gain_low": found and found.mean_gain_low,
            "mean_gain_high": found and found.mean_gain_high,
            "bits_per_client": self.bits,
        }


def demo(out: Path, console: Console, *, rounds: int = 100, seeds: int = 3) -> None:
    """Run the demonstration; print a table and what to deploy, write figures.

    Args:
        out: the folder for figures and results.json; made if it is missing.
        console: where to print.
        rounds: rounds of communication; training alone takes as many as are best.
        seeds: number of runs to average over.
    """
    begun = time.perf_counter()

    def say(text: str) -> None:
        console.print(text, highlight=False)

    splits = _splits(seeds)
    say(
        f"{CLIENTS} clients hold {splits[0].train.total} handwritten digits for "
        f"training, {CLASSES} classes each, and are tested on "
        f"{splits[0].splits['test'].total} of their own."
    )
    scores, lines, runs = {}, {}, {}
    for name, (doing, _) in RUNS.items():
        with console.status(f"{doing} ..."):
            runs[name] = _completed(name, splits, rounds)
        for method, (run, model) in METHODS.items():
            if run == name:
                scores[method] = _score(runs, name, model)
                rows = rows_of(runs[name])
                lines[method] = curves(rows, "test", "accuracy")[model]
                seconds = time.perf_counter() - begun
                mean = scores[method].accuracy.mean()
                say(f"{seconds:5.1f} s  {method}: {mean:.1%} of test digits right")
    alone = runs["alone"].budget._asdict()
    figures = _figures(scores, lines, out, seeds, alone)
    sentence = advice(scores)
    console.print(_table(scores, seeds), highlight=False)
    say(f"{ALONE}: {training_alone(alone)}.")
    say(sentence)
    results = {
        "clients": CLIENTS,
        "classes_per_client": CLASSES,
        "cohort": COHORT,
        "rounds": rounds,
        "alone": alone,
        "seeds": seeds,
        "seconds": round(time.perf_counter() - begun, 2),
        "methods": {name: score.numbers() for name, score in scores.items()},
        "accuracy_by_client": {m: s.accuracy.tolist() for m, s in scores.items()},
        "gain_by_client": {
            name: {of: getattr(score.gain, of).tolist() for of in GAIN}
            for name, score in scores.items()
            if score.gain is not None
        },
        "advice": sentence,
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    names = ", ".join(path.name for path in figures if path.suffix == ".png")
    say(f"In {out}: results.json, {names} (and SVG).")


def advice(scores: dict[str, Score]) -> str:
    """Which method to deploy, in one sentence.

    Methods are compared client by client. A mean difference of less than two standard
    errors over clients counts as none, and then fewer bits decide.
    """
    named = {name: f"{name} ({of.accuracy.mean():.1%})" for name, of in scores.items()}
    best = max(scores, key=lambda name: scores[name].accuracy.mean())
    alike = [name for name in scores if not _apart(scores[best], scores[name])]
    choice = min(
        alike, key=lambda name: (scores[name].bits, -scores[name].accuracy.mean())
    )
    clients = len(scores[choice].accuracy)
    others = ", ".join(named[name] for name in alike if name != choice)
    because = "clearly better than all others"
    if others:
        because = f"on {clients} clients it cannot be told apart from {others}, and "
        cheaper = all(
            scores[name].bits > scores[choice].bits for name in alike if name != choice
        )
        because += "sends the least" if cheaper else "none of them sends less"
    gain = scores[choice].gain
    if gain is None:
        return f"Deploy {named[choice]}: {because}."
    worse = gain_summary(gain).count or "none"
    return (
        f"Deploy {named[choice]}: {because}; {worse} of the {clients} clients would "
        "clearly have done better alone."
    )


def _apart(best: Score, other: Score) -> bool:
    gap = best.accuracy - other.accuracy
    return bool(gap.mean() > 2 * gap.std(ddof=1) / np.sqrt(len(gap)))


def _splits(seeds: int) -> list[fb.FederatedData]:
    """The same clients, with other digits held out for every seed."""
    dataset = fb.datasets.load("digits")
    partition = fb.partition.classes_per_client(dataset.rows[1], CLIENTS, CLASSES)
    return [
        fb.data.federate_dataset(dataset, partition, test=0.3, split=seed)
        for seed in range(seeds)
    ]


def _completed(name: str, splits: Sequence[fb.FederatedData], rounds: int) -> fb.Run:
    """A completed run, with a seed for each split."""
    model = fb.models.build("softmax", (8, 8, 1), 10)
    loss = fb.losses.cross_entropy(model.apply)
    start = fb.train_alone if name == "alone" else fb.simulate
    return start(
        RUNS[name][1](loss),
        model.init(jax.random.key(0)),
        splits,
        jax.random.split(jax.random.key(0), len(splits)),
        rounds=rounds,
        cohort=COHORT,
        measure=fb.metrics.standard("classes", loss, model.apply),
        splits=["test"],
    ).complete()


def _score(runs: dict[str, fb.Run], name: str, model: str) -> Score:
    """The final accuracies of a model, its bits, and its gain over training alone."""
    run, alone = runs[name], runs["alone"]
    accuracy = np.mean([of["test"][model]["accuracy"] for of in run.measured], axis=0)
    costs = [summary["bits"] for summary in run.summary()]
    bits = np.mean([cost["up"] + cost["down"] for cost in costs]) / CLIENTS
    gain = None
    if run is not alone:
        evidence = run.evidence._replace(
            measured=_beside(run.measured, alone.measured, model),
            by_row=_beside(run.by_row, alone.by_row, model),
        )
        gain = evidence.gain("test", "accuracy", "local")
    return Score(accuracy.astype(np.float64), float(bits), gain)


def _beside(of: list[Measured], alone: list[Measured], model: str) -> list[Measured]:
    """A model on test rows as the personal one, beside that of training alone."""
    return [
        {"test": {"personal": own["test"][model], "local": other["test"]["personal"]}}
        for own, other in zip(of, alone, strict=True)
    ]


def _table(scores: dict[str, Score], seeds: int) -> Table:
    table = Table(
        title=f"Test accuracy over {CLIENTS} clients, mean of {seeds} seeds",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("model")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for method, score in scores.items():
        of = score.numbers()
        gain, *counts = ["-"] * 3
        if of["mean_gain"] is not None:
            ends = (of["mean_gain"], of["mean_gain_low"], of["mean_gain_high"])
            gain = "{:+.1f} ({:+.1f}, {:+.1f})".format(*(100 * end for end in ends))
            counts = [str(of["better_than_local"]), str(of["worse_than_local"])]
        accuracy = (f"{of['mean']:.1%}", f"{of['worst_tenth']:.1%}")
        bits = human_bits(of["bits_per_client"])
        table.add_row(method, *accuracy, gain, *counts, bits)
    return table


def _figures(
    scores: dict[str, Score],
    lines: dict[str, Curve],
    out: Path,
    seeds: int,
    alone: dict[str, Any],
) -> list[Path]:
    """Accuracy over rounds, and each client's gain over training alone."""
    out.mkdir(parents=True, exist_ok=True)
    gains = {
        name: Comparison("test", "accuracy", {}, {"local": score.gain}, seeds)
        for name, score in scores.items()
        if score.gain is not None
    }
    labels = {ALONE: f"{ALONE} ({rounds_alone(alone)})"}
    lines = {labels.get(name, name): curve for name, curve in lines.items()}
    title = f"Digits held by {CLIENTS} clients, {CLASSES} classes each"
    title = f"{title}; bands: range of {seeds} seeds"
    return [
        *plot_methods(lines, title, out / "accuracy"),
        *plot_method_gains(gains, out / "gains", alone),
    ]
