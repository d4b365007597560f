# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L1: personal language models, fifty clients on one frozen base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedblend as fb
from fedblend_reproductions.adapters import comparison
from fedblend_reproductions.adapters.language_runs import (
    ADAPTERS,
    FULL,
    Result,
    Runs,
)
from fedblend_reproductions.adapters.language_task import FULL as FULL_PLAN
from fedblend_reproductions.adapters.language_task import QUICK as QUICK_PLAN
from fedblend_reproductions.adapters.language_task import Plan, Task, task_of
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict
from fedblend_reproductions.plots import panels
from fedblend_reproductions.text.base import FIGURES, save_base, train_base
from fedblend_reproductions.text.corpus import read_corpus

CLOSE = 0.02
"""How much more perplexity adapters may have than full fine-tuning."""
CRITERION = (
    "Criterion, fixed before the run: the shared adapter's perplexity on test windows "
    "(exp of the mean over clients and splits of their mean loss by token) is at most "
    "2 % above that of full fine-tuning in the same rounds and steps, each with its "
    "best rate on validation windows."
)
LOSS = fb.metrics.Metric(lambda model, batch: np.nan, higher_is_better=False)  # type: ignore
"""A loss that was measured: which direction is better."""
PERSONAL = ("FLIX", "APFL", "Ditto", "FedAlt")


def prepared(plan: Plan, folder: Path) -> Task:
    """The clients, and the base, which is trained where the folder has none."""
    corpus = read_corpus(plan.base.clients, plan.base.least)
    place = folder / "base"
    if not (place / FIGURES).exists():
        save_base(place, train_base(plan.base, corpus))
    return task_of(plan, corpus, place)


def perplexity(result: Result) -> float:
    """Over clients and splits: exp of the mean of their mean losses."""
    return float(np.exp(comparison.client_means(result).mean()))


def check(quick: bool, folder: Path) -> Finding:
    """Every method, and who is harmed."""
    plan = QUICK_PLAN if quick else FULL_PLAN
    task = prepared(plan, folder)
    runs = Runs(task, Cache(folder, {"plan": repr(plan)}))
    alone, flix = runs.alone_and_flix()
    found = {
        "base": runs.base(),
        "all weights": runs.shared(FULL, plan.rank),
        "shared adapter": runs.shared(ADAPTERS, plan.rank),
        "alone": alone,
        "FLIX": flix,
        "APFL": runs.apfl(),
        "Ditto": runs.ditto(),
        "FedAlt": runs.fedalt(),
    }
    names = list(task.splits[0].names)
    others = {"shared": found["shared adapter"], "alone": alone}
    harms = {
        name: comparison.harm(LOSS, found[name], others, names)._asdict()
        for name in PERSONAL
    }
    numbers = {
        "perplexity": {name: perplexity(result) for name, result in found.items()},
        "by_kind": _by_kind(task, found),
        "by_client": {
            name: np.exp(comparison.client_means(result).mean(axis=0))
            for name, result in found.items()
        },
        "clients": names,
        "bits": {name: result["bits"] for name, result in found.items()},
        "seconds": {name: result["seconds"] for name, result in found.items()},
        "harm": harms,
        "rates": {
            "adapters": dict(
                zip(plan.adapter_rates, runs.rates(ADAPTERS, plan.rank), strict=True)
            ),
            "all weights": dict(
                zip(plan.full_rates, runs.rates(FULL, plan.rank), strict=True)
            ),
        },
        "rounds_alone": runs.rounds_alone(),
        "weights": fb.trees.size(task.base),
    }
    excess = _excess(numbers)
    verdict = Verdict.reproduced if excess <= CLOSE else Verdict.differs
    return Finding(
        verdict,
        _ours(numbers),
        numbers,
        {"perplexity": _figure(task, numbers)},
        why=_setting(plan, task),
        table=_table(numbers),
        criterion=CRITERION,
    )


def _by_kind(task: Task, found: Mapping[str, Result]) -> dict[str, dict[str, float]]:
    kinds = np.array(task.kinds)
    by_name = {name: comparison.client_means(found[name]) for name in found}
    return {
        name: {
            kind: float(np.exp(means[:, kinds == kind].mean()))
            for kind in dict.fromkeys(task.kinds)
        }
        for name, means in by_name.items()
    }


def _excess(numbers: Numbers) -> float:
    """How much more perplexity the shared adapter has than full fine-tuning."""
    found = numbers["perplexity"]
    return found["shared adapter"] / found["all weights"] - 1


def _ours(numbers: Numbers) -> str:
    found, bits = numbers["perplexity"], numbers["bits"]
    part = bits["shared adapter"][0] / bits["all weights"][0]
    best = min(PERSONAL, key=lambda name: found[name])
    harmed = numbers["harm"][best]["harmed"]
    return (
        f"The shared adapter has perplexity {found['shared adapter']:.1f}, full "
        f"fine-tuning {found['all weights']:.1f} ({100 * _excess(numbers):+.1f} %), "
        f"the base {found['base']:.1f}; an adapter sends {100 * part:.1f} % of the "
        f"bits. The best personal one is {best} with {found[best]:.1f}, which harms "
        f"{harmed} of {len(numbers['clients'])} clients; adapters alone have "
        f"{found['alone']:.1f}."
    )


def _setting(plan: Plan, task: Task) -> str:
    size = fb.trees.size(task.base)
    return (
        f"{task.splits[0].clients} clients, half of them users of "
        "quantumcomputing.stackexchange.com, half roles of Shakespeare, at most "
        f"{plan.windows} windows of {plan.length} tokens each; {plan.splits} splits of "
        f"these windows. The base has {size:,} weights and has seen none of them. All "
        f"methods: {plan.rounds} rounds of all clients, {plan.steps} steps of Adam on "
        f"{plan.batch} windows, adapters of rank {plan.rank}. FLIX and APFL mix the "
        f"products of factors, from alpha {plan.alpha:g}; Ditto has lam {plan.lam:g}; "
        "FedAlt splits its steps between its two adapters. How long clients train "
        "alone is chosen on validation windows."
    )


def _table(numbers: Numbers) -> list[list[str]]:
    head = ["method", "perplexity", "users", "roles", "harmed", "KB a round"]
    rows, clients = [head], len(numbers["clients"])
    for name, value in numbers["perplexity"].items():
        kinds = numbers["by_kind"][name]
        harm = numbers["harm"].get(name)
        traffic = sum(numbers["bits"][name]) / 8e3
        rows.append(
            [
                name,
                f"{value:.2f}",
                *(f"{each:.2f}" for each in kinds.values()),
                "" if harm is None else f"{harm['harmed']} of {clients}",
                "" if name == "base" else f"{traffic:,.0f}",
            ]
        )
    return rows


def _figure(task: Task, numbers: Numbers) -> Any:
    """Each client's perplexity beside that of the shared adapter."""
    clients = numbers["by_client"]
    shared = np.array(clients["shared adapter"])
    shown = ("all weights", "alone", *PERSONAL)
    kinds = np.array(task.kinds)
    with panels(2, 3) as (figure, axes):
        for panel, name in zip(axes.ravel(), shown, strict=True):
            ratio = np.array(clients[name]) / shared
            for kind in dict.fromkeys(task.kinds):
                here = kinds == kind
                panel.scatter(shared[here], ratio[here], s=12, label=kind)
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set_title(name)
            panel.set_xlabel("perplexity, shared adapter")
            panel.set_ylabel("ratio to it")
        axes[0, 0].legend()
    return figure


def headline(numbers: Numbers) -> str:
    """The deciding number in one sentence."""
    return (
        f"the shared adapter's perplexity is {100 * _excess(numbers):+.1f} % beside "
        "full fine-tuning's"
    )


L1 = Claim(
    "L1",
    "Text: adapters against full fine-tuning",
    "Adapters of low rank perform on par with full fine-tuning, or better, with few "
    "trainable parameters (Hu et al. 2022, abstract); personal ones beside a shared "
    "one serve each client (Pillutla et al. 2022).",
    check,
    headline,
    resumable=True,
)
