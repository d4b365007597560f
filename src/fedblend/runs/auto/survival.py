# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend auto --event``: what times until an event have besides other targets.

Methods are Cox models, tuned and decided on as all others. There is no run in rounds:
the loss of a row depends on all rows at risk with it. ``models.json`` has the models of
all rows instead, and ``curves.csv`` what they predict next to Kaplan-Meier's curve.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config.build import Built, build
from fedblend.config.config import Config
from fedblend.config.tables.data import load_dataset
from fedblend.data.dataset import Dataset, Task
from fedblend.runs import run_folder
from fedblend.runs.auto.candidates import ALONE, COX, Request
from fedblend.runs.auto.contest import Contest
from fedblend.runs.auto.linear import coefficients
from fedblend.runs.auto.survival_rows import read_survival, views
from fedblend.runs.auto.tuning import AnySplit, models
from fedblend.runs.auto.verdict import interval
from fedblend.runs.auto.why import fitted_rows
from fedblend.runs.survival_models import (
    CURVES,
    MODELS,
    PREPROCESSING,
    survival_of,
)
from fedblend.stats.survival import (
    RiskSets,
    concordance,
    integrated_brier,
    kaplan_meier,
    read_targets,
    survive,
)

KAPLAN_MEIER = "kaplan_meier"
"""The reference: a client's own survival, the same for all of its rows."""
POINTS = 60
"""Times of a curve on the page."""
QUARTERS = (0.25, 0.5, 0.75)
"""Of the times of all events: where survival is predicted."""
CURVE = ("client", "time", "kaplan_meier", "predicted")
Row = dict[str, Any]


def read_datasets(config: Config, request: Request) -> list[Dataset]:
    """The rows of a table, with each target that they may be looked at with."""
    if request.event is None:
        return [load_dataset(config.data)]
    return views(read_survival(request))


def build_rows(config: Config, request: Request) -> Built:
    """The clients' rows in all splits; times are those of ``stats.survival``."""
    if request.event is None:
        return build(config)
    built = build(config, read_survival(request))
    labels = ("censored", str(request.event))
    # No dataset has this kind.
    kind: Any = "survival"
    task = built.task._replace(kind=kind, center=0.0, scale=1.0, labels=labels)
    return built._replace(task=task)


def add_survival(state: dict[str, Any], contest: Contest, clients: list[Row]) -> None:
    """Add C-index and integrated Brier score, with intervals over splits.

    Kaplan-Meier's curve becomes a method; ``clients`` get events and C-indices.
    """
    table, methods, said = contest.table, state["methods"], []
    constant = contest.constants[0]._asdict()
    made = {key: float(np.nanmean(of)) for key, of in constant.items()}
    made |= {"title": "Kaplan-Meier", "setting": {}, "seconds": 0.0}
    methods[KAPLAN_MEIER] = made | {"metrics": {contest.metric: made["test"]}}
    held = table.to_test[0].held.targets
    state["held"] = [len(held), int(read_targets(held)[1].sum())]
    for row in clients:
        row["events"] = round(row["target"] * row["rows"])
    for name in (*COX, KAPLAN_MEIER):
        of = methods.get(name, {"not_trained": ""})
        if "not_trained" in of:
            continue
        each = [_measure(table.task, name, of["setting"], one) for one in table.to_test]
        ranks, _ = found = np.stack(each, axis=1)
        of["intervals"] = {}
        for key, values in zip(("c_index", "brier"), found, strict=True):
            known = values[np.isfinite(values).any(axis=1)]
            of["intervals"][key] = interval(np.nanmean(known, axis=1)[:, None])
            of["metrics"][key] = of["intervals"][key][0]
        if name != KAPLAN_MEIER:
            middle, low, high = of["intervals"]["c_index"]
            said.append(f"{of['title']} {middle:.3f} ({low:.3f} to {high:.3f})")
            for row, own in zip(clients, ranks.T, strict=True):
                known = own[np.isfinite(own)]
                row[f"c_index_{name}"] = float(known.mean()) if known.size else None
    line = "C-index, mean over clients, with 95 % intervals over splits: "
    state["verdict"].append(f"{line}{'; '.join(said)}.")


def _measure(
    task: Task, name: str, setting: Mapping[str, float], split: AnySplit
) -> np.ndarray:
    """The C-index and the integrated Brier score of every client, [2, clients]."""
    train, held = split.train, split.held
    if name == KAPLAN_MEIER:
        own = np.zeros((len(train.counts), train.inputs.shape[1]))
    else:
        own = models(task, name, train, setting)
    scores, found = (train.scores(own)[:, 0], held.scores(own)[:, 0]), []
    parts = zip(train.risk_sets, train.clients, held.clients, strict=True)
    for sets, here, there in parts:
        known, targets = train.targets[here], held.targets[there]
        curve = np.stack([sets.times, sets.survival(scores[0][here])])
        risk = np.exp(scores[1][there])[:, None]
        if name == KAPLAN_MEIER:
            curve = kaplan_meier(*read_targets(known))

        def survival(times, curve=curve, risk=risk):
            return survive(curve, times) ** risk

        brier = integrated_brier(survival, targets, known)
        found.append((concordance(scores[1][there], targets), brier))
    return np.array(found).T


def write_survival(
    out: Path, config: Config, request: Request, state: dict[str, Any]
) -> None:
    """Fit every method to all rows, and write its models and its curves.

    Args:
        out: the folder of the comparison.
        config: any, of the same table.
        request: what was asked for.
        state: of the comparison; letters and bits are added.
    """
    data = config.data.model_copy(update={"test": 0.0})
    built = build_rows(config.model_copy(update={"data": data}), request)
    rows, clients = fitted_rows(built), built.federated_data
    names = [clients.name(client) for client in range(clients.clients)]
    times, events = read_targets(rows.targets)
    quarters = np.quantile(times[events], QUARTERS)
    horizons = sorted({float(f"{of:.3g}") for of in quarters})
    methods, shared = {}, {}
    everybody = RiskSets(rows.targets)
    for name in COX:
        known = state["methods"].get(name, {"not_trained": ""})
        if "not_trained" in known:
            continue
        rows.letters = 0
        found = coefficients(
            "survival", rows, 1, **known["setting"], share=name != ALONE
        )
        own = found.shared + found.own
        scores = rows.scores(own)[:, 0]
        methods[name] = {
            client: _plain(model, sets, scores[at])
            for client, model, sets, at in zip(
                names, own, rows.risk_sets, rows.clients, strict=True
            )
        }
        size = 0
        if name != ALONE:
            scores = rows.scores(found.shared[None])[:, 0]
            shared[name] = _plain(found.shared, everybody, scores)
            size = len(found.shared) - 1
        known["letters"] = rows.letters
        # A gradient and a symmetric Hessian up, a model down.
        known["numbers"] = size * (size + 3) // 2
        known["bits_per_client"] = 32 * rows.letters * (known["numbers"] + size)
    (fitted,) = built.preprocessing
    text = {
        "inputs": list(fitted.features),
        "client": request.client,
        "horizons": horizons,
        "methods": methods,
        "shared": shared,
    }
    run_folder.write_text(out / MODELS, run_folder.json_text(text))
    run_folder.write_text(out / PREPROCESSING, fitted.dump())
    shown = methods[state["deploy"] or state["findings"]["better"]]
    lines = []
    for client, at in zip(names, rows.clients, strict=True):
        curve = kaplan_meier(times[at], events[at])
        grid = np.linspace(0, times[at].max(), POINTS)
        mean = survival_of(shown[client], rows.inputs[at, 1:], grid).mean(axis=0)
        each = zip(grid, survive(curve, grid), mean, strict=True)
        lines += [
            dict(zip(CURVE, (client, *map(float, of)), strict=True)) for of in each
        ]
    run_folder.write_table(out / CURVES, lines)


def _plain(model: np.ndarray, sets: RiskSets, scores: np.ndarray) -> Row:
    """Coefficients, and survival of a row whose inputs are all 0."""
    return {
        "coefficients": model[1:].tolist(),
        "times": sets.times.tolist(),
        "survival": sets.survival(scores).tolist(),
        "last": sets.last,
    }
