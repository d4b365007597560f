# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend auto --event``: Cox models, each client with its own baseline hazard.

Methods share the slopes, or some of them, and are tuned and decided on as all others.
There is no run in rounds: the loss of a row depends on all rows at risk with it.
``models.json`` has the coefficients and the survival of every client instead, and
``preprocessing.json`` what makes inputs of columns.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.data.dataset import DataError, Dataset, Task
from fedblend.data.federated import FederatedData
from fedblend.data.partition import by_key, federate_dataset
from fedblend.errors import UserError
from fedblend.runs import run_folder
from fedblend.runs.auto.candidates import ALONE, TEST, VALIDATION, Candidate, Request
from fedblend.runs.auto.contest import Contest
from fedblend.runs.auto.cox import cox_models, measure_cox
from fedblend.runs.auto.folder import method_rows, open_state
from fedblend.runs.auto.linear import PooledRows
from fedblend.runs.auto.survival_rows import read_survival
from fedblend.runs.auto.tuning import Split
from fedblend.runs.auto.verdict import interval
from fedblend.stats.survival import (
    RiskSets,
    integrated_brier,
    kaplan_meier,
    read_targets,
    survive,
)

METHODS = (
    Candidate(ALONE, "local only", {"slopes": 0.1}, again={"slopes": 1e-4}),
    Candidate("fedavg", "FedAvg", {"ridge": 0.1}),
    Candidate(
        "hierarchical",
        "hierarchical",
        {"slopes": 0.01, "ridge": 0.1},
        {"ridge": ("fedavg", "ridge")},
    ),
)
"""Settings are the variance of own slopes, and the ridge penalty of shared ones."""
SPLITS = 20
KAPLAN_MEIER = "kaplan_meier"
"""The reference: a client's own survival, the same for all of its rows."""


class Splits(NamedTuple):
    """The same rows in several splits, as ``Contest`` reads those of a table."""

    task: Any
    federations: Sequence[FederatedData]

    @property
    def federated_data(self) -> FederatedData:
        """The first split."""
        return self.federations[0]


class SurvivalComparison:
    """A comparison in progress; ``state`` is the content of ``auto.json``."""

    def __init__(self, request: Request, out: Path, minutes: float, screen: Any):
        for key in ("kind", "scale", "once", "time", "group"):
            if (value := getattr(request, key)) is not None:
                raise UserError(key, value, "left out where event is given")
        self.request, self.out, self.screen = request, out, screen
        self.seconds, self._begun = 60 * minutes, time.perf_counter()
        self.state = open_state(request, out)

    def complete(self) -> None:
        """Compare and write the folder; a finished comparison is only said again."""
        state, say = self.state, self.screen.say
        if "seconds" in state:
            say("\n".join(state["lines"]))
            return
        dataset = read_survival(self.request)
        whole = split_rows(dataset, 0, 0.0, 0.0)
        state["lines"] = describe(dataset, whole, self.request.client)
        say("\n".join(state["lines"]))
        tested = self._compare(dataset)
        ranks = _judge(state, tested)
        rows = PooledRows.read(whole.train)
        found = {"rows": rows.counts, "events": count_events(whole), **ranks}
        by_client = [
            {"client": whole.name(place)}
            | {key: of[place] for key, of in found.items()}
            for place in range(whole.clients)
        ]
        self.out.mkdir(parents=True, exist_ok=True)
        run_folder.write_table(self.out / "clients.csv", by_client)
        run_folder.write_table(self.out / "results.csv", method_rows(state))
        assert whole.preprocessing is not None
        models = {
            "inputs": list(whole.preprocessing.features),
            "methods": _final_models(state["methods"], rows, whole.names),
        }
        state["seconds"] = self.seconds
        texts = {"models": models, "auto": state}
        for name, of in texts.items():
            run_folder.write_text(self.out / f"{name}.json", run_folder.json_text(of))
        text = whole.preprocessing.dump()
        run_folder.write_text(self.out / "preprocessing.json", text)

    def _compare(self, dataset: Dataset) -> Sequence[Split]:
        """Tune every method, score it, and decide; the splits with test rows."""
        chosen, tested = (
            Splits(
                # No dataset has this kind.
                Task("survival", 1, ()),  # pyright: ignore[reportArgumentType]
                [split_rows(dataset, seed, part, TEST) for seed in range(SPLITS)],
            )
            for part in (VALIDATION, 0.0)
        )
        known: Any = self.state["methods"]
        contest = Contest.read(self.request, chosen, tested, known)  # type: ignore
        self.state |= {"metric": contest.metric, "kind": contest.table.task.kind}
        self.state["left_out"] = []
        for candidate in METHODS:
            contest.evaluate(candidate, self._left)
            if not contest.methods[candidate.name]["tuned"]:
                self.state["left_out"].append(f"more settings of {candidate.title}")
        contest.record(self.state)
        scores = contest.constants[0]
        means = {key: float(np.nanmean(of)) for key, of in scores._asdict().items()}
        made = {"title": "Kaplan-Meier", "setting": {}, "seconds": 0.0, **means}
        made["metrics"] = {contest.metric: means["test"]}
        contest.methods[KAPLAN_MEIER] = made
        return contest.table.to_test

    def _left(self) -> float:
        self.screen.stop()
        return self._begun + self.seconds - time.perf_counter()


def split_rows(
    dataset: Dataset, split: int, validation: float, test: float
) -> FederatedData:
    """The clients' rows, some held out."""
    assert dataset.keys is not None
    return federate_dataset(
        dataset, by_key(dataset.keys), validation=validation, test=test, split=split
    )


def count_events(data: FederatedData) -> np.ndarray:
    """The events of every client."""
    each = map(data.train.rows, range(data.clients))
    return np.array([read_targets(targets)[1].sum() for _, targets in each])


def describe(dataset: Dataset, whole: FederatedData, client: str) -> list[str]:
    """What is seen in the table, in sentences; warnings first."""
    if whole.clients < 2:
        raise DataError(
            f"{client}: all rows belong to one client; a comparison needs 2 or more"
        )
    counts, events = whole.train.counts, count_events(whole)
    none = [repr(whole.name(int(one))) for one in np.flatnonzero(events == 0)]
    said = [f"all rows of {one} are censored: they tell little" for one in none]
    assert whole.preprocessing is not None
    return [
        *(f"warning: {line}" for line in (*dataset.notes, *said)),
        *(f"  {of['column']}: {of['done']}" for of in whole.preprocessing.describe()),
        f"{counts.sum()} rows of {whole.clients} clients, {counts.min()} to "
        f"{counts.max()} each; {events.sum()} events, {events.min()} to {events.max()} "
        "each; other rows are censored.",
    ]


def _judge(state: dict[str, Any], splits: Sequence[Split]) -> dict[str, np.ndarray]:
    """Add C-index and integrated Brier score; the former of every client."""
    said, found = [], {}
    for name, of in state["methods"].items():
        each = np.stack([_measure_survival(one, name, of["setting"]) for one in splits])
        ranks = each[:, 0]
        of["metrics"]["brier"] = float(np.nanmean(each[:, 1]))
        by_split = [np.nanmean(of) for of in ranks if np.isfinite(of).any()]
        middle, low, high = interval(np.array(by_split)[:, None])
        of["metrics"]["c_index"] = middle
        if name != KAPLAN_MEIER:
            said.append(f"{of['title']} {middle:.3f} ({low:.3f} to {high:.3f})")
            total = np.nansum(ranks, axis=0)
            with np.errstate(invalid="ignore"):
                found[f"c_index_{name}"] = total / np.isfinite(ranks).sum(axis=0)
    line = "C-index, mean over clients, with 95 % intervals over splits: "
    state["verdict"].append(f"{line}{'; '.join(said)}.")
    return found


def _models(rows: PooledRows, name: str, setting: Any) -> np.ndarray:
    if name == KAPLAN_MEIER:
        return np.zeros((len(rows.counts), rows.inputs.shape[1]))
    return cox_models(rows, **setting, share=name != ALONE)


def _measure_survival(split: Split, name: str, setting: Any) -> np.ndarray:
    """The C-index and the integrated Brier score of every client, [2, clients]."""
    train, held = split
    models, brier = _models(train, name, setting), []
    scores = train.scores(models)[:, 0], held.scores(models)[:, 0]
    for here, there in zip(train.clients, held.clients, strict=True):
        known, sets = train.targets[here], RiskSets(train.targets[here])
        curve = np.stack([sets.times, sets.survival(scores[0][here])])
        risk = np.exp(scores[1][there])[:, None]
        if name == KAPLAN_MEIER:
            curve = kaplan_meier(*read_targets(known))

        def survival(times, curve=curve, risk=risk):
            return survive(curve, times) ** risk

        brier.append(integrated_brier(survival, held.targets[there], known))
    return np.stack([measure_cox(scores[1][:, None], held)["c_index"], brier])


def _final_models(
    methods: Mapping[str, Any], rows: PooledRows, names: Sequence[str]
) -> dict[str, Any]:
    """Coefficients, and survival of a row whose inputs are all 0, by client."""
    found: dict[str, Any] = {}
    for name in [one.name for one in METHODS]:
        models, found[name] = _models(rows, name, methods[name]["setting"]), {}
        scores = rows.scores(models)[:, 0]
        for client, model, at in zip(names, models, rows.clients, strict=True):
            sets = RiskSets(rows.targets[at])
            found[name][client] = {
                "coefficients": model[1:].tolist(),
                "times": sets.times.tolist(),
                "survival": sets.survival(scores[at]).tolist(),
            }
    return found
