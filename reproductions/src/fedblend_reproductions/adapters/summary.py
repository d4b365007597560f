# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""All methods on a task, as numbers, as a table and as a figure."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import fedblend as fb
from fedblend_reproductions.adapters import comparison
from fedblend_reproductions.adapters.runs import ADAPTERS, FULL, Result, Runs
from fedblend_reproductions.adapters.task import Task
from fedblend_reproductions.claims import Numbers
from fedblend_reproductions.plots import panels

PERSONAL = ("FLIX", "APFL", "Ditto", "FedAlt")
WHOLE, SHARED, ALONE = "all weights", "shared adapter", "alone"
Score = Callable[[np.ndarray], Any]
"""From means of the metric to what is shown, such as a perplexity."""


def numbers_of(runs: Runs, score: Score) -> dict[str, Any]:
    """Every method, measured.

    Args:
        runs: of the task.
        score: of a mean of the metric over clients, or of each client.
    """
    task, plan = runs.task, runs.plan
    alone, flix = runs.alone_and_flix()
    found = {
        "base": runs.base(),
        WHOLE: runs.shared(FULL, plan.rank),
        SHARED: runs.shared(ADAPTERS, plan.rank),
        ALONE: alone,
        "FLIX": flix,
        "APFL": runs.apfl(),
        "Ditto": runs.ditto(),
        "FedAlt": runs.fedalt(),
    }
    return {
        "score": {name: _score(result, score) for name, result in found.items()},
        "by_group": {name: _groups(task, found[name], score) for name in found},
        "by_client": {
            name: score(comparison.client_means(result).mean(axis=0))
            for name, result in found.items()
        },
        "clients": task.names,
        "bits": {name: result["bits"] for name, result in found.items()},
        "seconds": {name: result["seconds"] for name, result in found.items()},
        "harm": _harms(task, found),
        "rates": {
            ADAPTERS: _by_rate(plan.adapter_rates, runs.rates(ADAPTERS, plan.rank)),
            WHOLE: _by_rate(plan.full_rates, runs.rates(FULL, plan.rank)),
        },
        "alone": dict(zip(("rate", "rounds"), runs.budget_alone(), strict=True)),
        "weights": fb.trees.size(task.base),
    }


def _score(result: Result, score: Score) -> float:
    return float(score(comparison.client_means(result).mean()))


def _groups(task: Task, result: Result, score: Score) -> dict[str, float]:
    groups, means = np.array(task.groups), comparison.client_means(result)
    return {
        group: float(score(means[:, groups == group].mean()))
        for group in dict.fromkeys(task.groups)
    }


def _harms(task: Task, found: Mapping[str, Result]) -> dict[str, Any]:
    metric = task.metrics(task.model.apply)[task.metric]
    others = {name: found[name] for name in (SHARED, ALONE)}
    return {
        name: comparison.harm(metric, found[name], others, task.names)._asdict()
        for name in PERSONAL
    }


def _by_rate(rates: tuple[float, ...], losses: list[float]) -> dict[str, float]:
    return {f"{rate:g}": loss for rate, loss in zip(rates, losses, strict=True)}


def part_of_bits(numbers: Numbers) -> float:
    """What an adapter sends, as a part of what all weights are."""
    return numbers["bits"][SHARED][0] / numbers["bits"][WHOLE][0]


def table_of(numbers: Numbers, what: str, form: str) -> list[list[str]]:
    """A row for each method.

    Args:
        numbers: of ``numbers_of``.
        what: is shown.
        form: of its numbers.
    """
    groups = list(numbers["by_group"]["base"])
    groups = groups if len(groups) > 1 else []
    clients = len(numbers["clients"])
    rows = [["method", what, *groups, "harmed", "in one split", "KB a round"]]
    for name, value in numbers["score"].items():
        harm, traffic = numbers["harm"].get(name), sum(numbers["bits"][name]) / 8e3
        counts = ("harmed", "in_first_split")
        rows.append(
            [
                name,
                format(value, form),
                *(format(numbers["by_group"][name][group], form) for group in groups),
                *(f"{harm[key]} of {clients}" if harm else "" for key in counts),
                "" if name == "base" else f"{traffic:,.0f}",
            ]
        )
    return rows


def figure_of(groups: tuple[str, ...], numbers: Numbers, what: str) -> Any:
    """Each client with every method, beside the shared adapter."""
    clients, kinds = numbers["by_client"], np.array(groups)
    shared = np.array(clients[SHARED])
    with panels(2, 3) as (figure, axes):
        for panel, name in zip(axes.ravel(), (WHOLE, ALONE, *PERSONAL), strict=True):
            own = np.array(clients[name])
            for kind in dict.fromkeys(groups):
                panel.scatter(
                    shared[kinds == kind], own[kinds == kind], s=10, label=kind
                )
            ends = [min(shared.min(), own.min()), max(shared.max(), own.max())]
            panel.plot(ends, ends, color="black", linewidth=0.8)
            panel.set_title(name)
            panel.set_xlabel(f"{what}, {SHARED}")
            panel.set_ylabel(what)
        if len(set(groups)) > 1:
            axes[0, 0].legend()
    return figure
