# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The model card beside an exported model: what it is, how good, and for whom."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedblend.report.measures import MODELS, shown_metrics, shown_splits, training_alone
from fedblend.report.tables import markdown_text
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
    own = None if client is None else dict(lines[client])
    if own is not None:
        own["name"] = markdown_text(own["name"])
    (end,) = (one for one in run.summary["runs"] if one["seed"] == seed)
    whose = "shared model" if own is None else f"model of client {own['name']}"
    parts = [
        f"# {markdown_text(run.config.name)}: the {whose}",
        _what(run, own, end, len(lines)),
        "## Facts",
        _table(("", ""), _facts(run, own, end, len(lines))),
        "## Metrics",
        *_metrics(run, own, end),
        "## Privacy",
        _privacy(run, own),
        "## Limits",
        "\n".join(f"- {line}" for line in _limits(run, own, end)),
        "## File",
        _table(("", ""), _file(run, seed, file, sha256)),
    ]
    return "\n\n".join(parts) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _what(
    run: SavedRun, own: Mapping[str, str] | None, end: Mapping[str, Any], clients: int
) -> str:
    rows = markdown_text(repr(run.summary["data"].get("name", "")))
    start = (
        f"`{run.config.algorithm.name}` trained it in {end['round']} rounds on the "
        f"data {rows} of {clients} clients."
    )
    if own is None:
        return f"{start} It is the model that all clients share."
    if run.summary.get("personal_models") == "shared":
        return (
            f"{start} With this algorithm every client deploys the shared model; the "
            f"numbers below are those of client {own['name']}."
        )
    return f"{start} It is for client {own['name']}, and for nobody else."


def _facts(
    run: SavedRun, own: Mapping[str, str] | None, end: Mapping[str, Any], clients: int
) -> Iterator[tuple[str, str]]:
    config, task, fitted = run.config, run.task, run.preprocessing(end["seed"])
    yield "task", f"{task.kind}, {task.outputs} output{'s' * (task.outputs > 1)}"
    columns = task.columns if fitted is None else fitted.columns
    inputs = f"rows of shape {list(task.shape)}"
    yield "inputs", _listed(columns) if columns else inputs
    if fitted is not None:
        yield "preprocessing", f"in the file; {len(fitted.features)} inputs are made"
    if task.labels:
        yield "labels", _listed(task.labels)
    yield "model", f"`{config.model.name}`"
    options = config.algorithm.model_dump(exclude_none=True, exclude={"name"})
    chosen = {name: value for name, value in options.items() if value not in ({}, [])}
    words = ", ".join(f"{name} = {value}" for name, value in chosen.items())
    yield "algorithm", f"`{config.algorithm.name}` ({markdown_text(words):.300})"
    if own is not None and own.get("alpha"):
        yield "alpha, the weight of the shared model", f"{float(own['alpha']):.4g}"
    elif own is None and "alpha" in run.summary:
        alpha = run.summary["alpha"]
        bounds = f"{alpha['smallest']:.4g} to {alpha['largest']:.4g}"
        yield "alpha of the clients", f"{alpha['mean']:.4g} on average, {bounds}"
    yield "rounds", f"{end['round']}, {config.run.cohort or clients} clients in each"
    counted = [own] if own is not None else run.clients(end["seed"])
    for split in ("train", "validation", "test"):
        rows = sum(int(line[split]) for line in counted)
        if rows:
            yield f"{split} rows", str(rows)


def _metrics(
    run: SavedRun, own: Mapping[str, str] | None, end: Mapping[str, Any]
) -> Iterator[str]:
    measured = end["measures"]
    splits = shown_splits([{"measures": measured}])
    if not splits:
        yield "Nothing was measured."
        return
    split = splits[0]
    metrics = shown_metrics([{"measures": measured}], split)
    models = [model for model in reversed(MODELS) if model in measured[split]]
    if own is None:
        yield f"Means over clients, on {split} rows."
        heads = [
            NAMES[model] if model != "personal" else "personal" for model in models
        ]
        values = [
            [_number(measured[split][model][name]["mean"]) for model in models]
            for name in metrics
        ]
    else:
        yield f"On the {own.get(split) or 0} {split} rows of this client."
        heads = [NAMES[model] for model in models]
        values = [
            [_number(own.get(f"{split}_{model}_{name}")) for model in models]
            for name in metrics
        ]
    names = [[name, *cells] for name, cells in zip(metrics, values, strict=True)]
    yield _table(("metric", *heads), names)
    if own is not None and own.get("gain_low"):
        yield _gain(own, split, metrics[0], models)
    if end.get("alone"):
        yield f"Training alone: {training_alone(end['alone'])}."


def _gain(
    own: Mapping[str, str], split: str, metric: str, models: Sequence[str]
) -> str:
    low, high = float(own["gain_low"]), float(own["gain_high"])
    other = "training alone" if "local" in models else "the shared model"
    verdict = "the rows do not tell which is better"
    if low > 0:
        verdict = "this model is better"
    elif high < 0:
        verdict = f"this client is better off with {other}"
    return (
        f"Gain over {other} in {split} {metric}, 95 % interval: {low:+.4f} to "
        f"{high:+.4f} (above 0 is better): {verdict}."
    )


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


def _limits(
    run: SavedRun, own: Mapping[str, str] | None, end: Mapping[str, Any]
) -> Iterator[str]:
    if own is None:
        yield "It is an average: single clients may do better alone (`harm.csv`)."
        if run.summary.get("harm"):
            yield f"{run.summary['harm']}."
    else:
        yield "It saw no rows but this client's and what clients sent in training."
    yield "The metrics hold for rows like the held-out ones; later rows may differ."
    if run.preprocessing(end["seed"]) is not None:
        yield "A category that training did not see counts as unknown."
    for line in run.summary.get("warnings", ()):
        yield f"Warning of the run: {markdown_text(line)}"


def _file(
    run: SavedRun, seed: int, file: str, sha256: str
) -> Iterator[tuple[str, str]]:
    facts = run.summary
    yield "file", f"`{file}`"
    yield "sha256", f"`{sha256}`"
    yield "seed", str(seed)
    versions = [f"{name} {facts[name]}" for name in ("fedblend", "jax", "numpy")]
    yield "trained with", ", ".join([*versions, f"Python {facts['python']}"])
    for name, value in facts["data"].items():
        if name != "name":
            yield f"data: {markdown_text(name)}", f"`{_code(value)}`"


def _listed(words: Sequence[str]) -> str:
    more = f", ... ({len(words)} in all)" if len(words) > SHOWN else ""
    return ", ".join(markdown_text(str(word)) for word in words[:SHOWN]) + more


def _code(value: Any) -> str:
    """A value between backticks in a cell of a table."""
    return " ".join(str(value).replace("`", "'").split()).replace("|", "\\|")


def _number(value: Any) -> str:
    number = float("nan") if value in ("", None) else float(value)
    return f"{number:.4f}" if math.isfinite(number) else "-"
