# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The model card beside an exported model: what it is, how good, and for whom."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedblend.report.measures import MODELS, list_metrics, main_splits, training_alone
from fedblend.report.tables import markdown_text
from fedblend.runs import run_folder
from fedblend.runs.saved_run import SavedRun

SHOWN = 12
"""Columns or labels that are listed before the list is cut."""
NAMES = {
    "personal": "this model",
    "shared": "the shared model",
    "local": "trained alone",
}


def model_card(
    run: SavedRun, client: int | None, seed: int, file: str, sha256: str
) -> str:
    """The card of a model in Markdown.

    Args:
        run: the run that trained it.
        client: whose model it is; None for the shared one.
        seed: the seed of the run.
        file: the name of the exported file.
        sha256: of the exported file.
    """
    lines = run.clients(seed)
    own = None if client is None else lines[client]
    (end,) = (one for one in run.summary["runs"] if one["seed"] == seed)
    whose, about = "shared model", "It is the model that all clients share"
    if own is not None:
        name = markdown_text(own["name"])
        whose, about = f"model of client {name}", f"It is for client {name} only"
        if run.summary.get("personal_models") == "shared":
            about = f"It is the shared model; the numbers are those of client {name}"
    text = f"""\
# {markdown_text(run.config.name)}: the {whose}

`{run.config.algorithm.name}` trained it in {end["round"]} rounds of {len(lines)}
clients. {about}.{_deployed(run)}

## Facts

{_table(("", ""), _facts(run, lines if own is None else [own], seed))}

## Metrics

{_metrics(run, own, end)}

## Privacy

{_privacy(run, own)}

## Limits

- The metrics hold for rows like the held-out ones; later rows may differ.
- A category that training did not see counts as unknown.
"""
    warnings = map(markdown_text, run.summary.get("warnings", ()))
    text += "".join(f"- Warning of the run: {line}\n" for line in warnings)
    versions = {name: run.summary[name] for name in ("fedblend", "jax", "python")}
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    rows = [("file", file), ("sha256", sha256), ("seed", seed), ("trained with", made)]
    return f"{text}\n## File\n\n{_table(('', ''), rows)}\n"


def _deployed(run: SavedRun) -> str:
    if run.folder.models is None:
        return ""
    return """

The model of this file is trained on all rows. The metrics are of a model that was
trained in the same way without the test rows, on which they are measured."""


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _facts(
    run: SavedRun, lines: Sequence[Mapping[str, str]], seed: int
) -> list[tuple[str, Any]]:
    """What the model takes and gives, and the rows of ``lines``, its clients."""
    task, fitted = run.task, run.preprocessing(seed)
    columns = task.columns if fitted is None else fitted.columns
    found: list[tuple[str, Any]] = [
        ("task", f"{task.kind}, outputs: {task.outputs}"),
        ("inputs", _list_words(columns) or f"rows of shape {list(task.shape)}"),
        ("labels", _list_words(task.labels) or "-"),
        ("model", run.config.model.name),
    ]
    if len(lines) == 1 and lines[0].get("alpha"):
        weight = f"{float(lines[0]['alpha']):.4g}"
        found.append(("alpha, the weight of the shared model", weight))
    splits = ("train", "validation", "test")
    rows = {one: sum(int(line[one]) for line in lines) for one in splits}
    if run.folder.models is not None:
        rows = {"train": sum(rows.values())}
    found += [(f"{split} rows", count) for split, count in rows.items()]
    data = run.summary["data"].items()
    return found + [(f"data: {key}", markdown_text(str(value))) for key, value in data]


def _gain(run: SavedRun, client: str) -> Mapping[str, str] | None:
    """The line of ``harm.csv`` of a client whose gain has an interval."""
    harm = run.folder.harm
    lines = run_folder.read_table(harm) if harm.is_file() else []
    return next((one for one in lines if one["id"] == client and one["gain_low"]), None)


def _metrics(
    run: SavedRun, own: Mapping[str, str] | None, end: Mapping[str, Any]
) -> str:
    measured = end["measures"]
    splits = main_splits([{"measures": measured}])
    if not splits:
        return "Nothing was measured."
    split = splits[0]
    metrics = list_metrics([{"measures": measured}], split)
    models = [model for model in reversed(MODELS) if model in measured[split]]
    if own is None:
        first, heads = f"Means over clients, on {split} rows.", models
    else:
        first = f"On the {own.get(split) or 0} {split} rows of this client."
        heads = [NAMES[model] for model in models]
        if run.folder.models is not None:
            heads[models.index("personal")] = "trained without these rows"

    def cell(model: str, name: str) -> str:
        if own is None:
            return _number(measured[split][model][name]["mean"])
        return _number(own.get(f"{split}_{model}_{name}"))

    rows = [[name, *(cell(model, name) for model in models)] for name in metrics]
    parts = [first, _table(("metric", *heads), rows)]
    if own is not None and (gain := _gain(run, own["id"])):
        other = "training alone" if "local" in models else "the shared model"
        ends = f"{float(gain['gain_low']):+.4f} to {float(gain['gain_high']):+.4f}"
        parts.append(
            f"Gain over {other} in {split} {metrics[0]}, 95 % interval: {ends} "
            "(above 0 is better)."
        )
    if end.get("alone"):
        parts.append(f"Training alone: {training_alone(end['alone'])}.")
    return "\n\n".join(parts)


def _privacy(run: SavedRun, own: Mapping[str, str] | None) -> str:
    promise = run.summary.get("privacy")
    if promise is None:
        return "No guarantee: the run has no `[privacy]`."
    if own is None or run.summary.get("personal_models") == "shared":
        return f"{promise['sentence']}."
    return (
        f"No guarantee for this model, which was fitted to the rows of its client. Of "
        f"the run: {promise['sentence']}."
    )


def _list_words(words: Sequence[str]) -> str:
    more = f", ... ({len(words)} in all)" if len(words) > SHOWN else ""
    return ", ".join(markdown_text(str(word)) for word in words[:SHOWN]) + more


def _number(value: Any) -> str:
    number = float("nan") if value in ("", None) else float(value)
    return f"{number:.4f}" if math.isfinite(number) else "-"
