# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal: a table of its models, the verdict, and its costs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedblend.report import measures, verdict
from fedblend.report.measures import mean_over_seeds
from fedblend.report.tables import human_bits

COLORS = {"shared": "blue", "local": "yellow", "personal": "green"}
COLUMNS = {
    "mean": "mean",
    "weighted": "weighted",
    "std": "spread",
    "worst_tenth": "worst tenth",
    "worst": "worst",
}


def show(summary: dict[str, Any], console: Console) -> None:
    """Print a run.

    Args:
        summary: the content of ``summary.json``, or the last rows of an unfinished
            run as its "runs"; numbers of several seeds are averaged.
        console: where to print.
    """
    runs = summary["runs"]
    for split in measures.main_splits(runs):
        console.print(_table(runs, split))
    unseen = [one["unseen"] for one in runs if "unseen" in one]
    for split in measures.main_splits(unseen[:1]):
        number = unseen[0]["clients"]
        plural = "" if number == 1 else "s"
        console.print(_table(unseen, split, f" of {number} unseen client{plural}"))
    lines = []
    if alone := runs[0].get("alone"):
        lines.append(f"local, training alone: {measures.training_alone(alone)}")
    if "harmed" in summary:
        lines += verdict.sentences(summary)[1]
    if "unseen" in summary:
        told = verdict.sentences(summary | summary["unseen"] | {"runs": unseen})[1]
        lines += [f"Unseen clients: {line}" for line in told]
    lines += _server_lines(runs) + _certificate_lines(runs) + _cost_lines(runs)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    if "privacy" in summary:
        promise = summary["privacy"]["sentence"]
        console.print(f"privacy: {promise}", markup=False, soft_wrap=True)


def _table(summaries: Sequence[dict], split: str, kind: str = "") -> Table:
    """The models of a split, a line for each metric of each."""
    last = summaries[0]
    seeds = f", mean of {len(summaries)} seeds" if len(summaries) > 1 else ""
    table = Table(
        title=f"{split} rows{kind} after round {last['round']}{seeds}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("metric", no_wrap=True)
    table.add_column("model")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    models = last["measures"][split]
    for metric in measures.list_metrics([last], split):
        for model in (name for name in measures.MODELS if name in models):
            path = ("measures", split, model, metric)
            cells = [
                f"{mean_over_seeds(summaries, *path, field):.4f}" for field in COLUMNS
            ]
            table.add_row(metric, Text(model, COLORS[model]), *cells)
        table.add_section()
    return table


def _server_lines(summaries: Sequence[dict]) -> list[str]:
    """The shared model on the server's own rows, where it has some."""
    central = summaries[0].get("central", {})
    split = "test" if "test" in central else "train"
    names = [name for name in central.get(split, {}) if name != "rows"]
    if not names:
        return []
    values = [
        f"{name} {mean_over_seeds(summaries, 'central', split, name):.4f}"
        for name in names
    ]
    rows = central[split]["rows"]
    return [f"the server's {rows} {split} rows: shared model {', '.join(values)}"]


def _certificate_lines(summaries: Sequence[dict]) -> list[str]:
    """What is proven of the objective, for the worst of the seeds."""
    found = [one["certificate"] for one in summaries if "certificate" in one]
    if not found:
        return []
    worst = max(found, key=lambda one: one["gap"])
    which = ", the worst seed" if len(found) > 1 else ""
    return [
        f"certificate: f~ - min f~ <= {worst['gap']:.3g} (f~ = "
        f"{worst['objective']:.6g}, |grad f~| = {worst['gradient_norm']:.3g}{which})"
    ]


def _cost_lines(summaries: Sequence[dict]) -> list[str]:
    """Bits sent, updates that did not count, and seconds."""
    lines = []
    if "bits" in summaries[0]:
        parts = []
        for link in ("up", "down"):
            total = mean_over_seeds(summaries, "bits", link)
            each = mean_over_seeds(summaries, "bits", f"{link}_per_client", "mean")
            parts.append(f"{link} {human_bits(total)} ({human_bits(each)} a client)")
        lines.append("sent: " + ", ".join(parts))
    lost = {name: mean_over_seeds(summaries, name) for name in ("dropped", "rejected")}
    if any(number > 0 for number in lost.values()):
        lines.append(", ".join(f"{name}: {number:g}" for name, number in lost.items()))
    if "compile_seconds" in summaries[0]:
        seconds = mean_over_seeds(summaries, "seconds")
        parts = {
            "compiling": mean_over_seeds(summaries, "compile_seconds"),
            "measuring": mean_over_seeds(summaries, "measure_seconds"),
            "training alone": mean_over_seeds(summaries, "alone", "seconds"),
        }
        others = [f", {name} {s:.2f} s" for name, s in parts.items() if not np.isnan(s)]
        lines.append(f"time: rounds {seconds:.2f} s{''.join(others)}")
    return lines
