# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The methods of a comparison on the splits of its table: settings and scores."""

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from fedblend.config.build import Built
from fedblend.runs.auto.additive import count_bins, evaluate_additive
from fedblend.runs.auto.candidates import ALONE, BY_NAME, Candidate, Request
from fedblend.runs.auto.letters import count_numbers, expand_splits, read_letters
from fedblend.runs.auto.network import evaluate_network
from fedblend.runs.auto.reference import evaluate_trees
from fedblend.runs.auto.sentences import no_verdict, sentences
from fedblend.runs.auto.tuning import (
    LateSplit,
    Split,
    Table,
    evaluate_linear,
    measure,
    measure_constants,
)
from fedblend.runs.auto.verdict import (
    FEW_CLIENTS,
    JUDGED,
    Findings,
    MethodScores,
    comparable_means,
    decide,
    difference,
    find_untrained,
    interval,
    mean,
)

CRITERIA = {
    "binary": ("log_loss", "log loss"),
    "classes": ("log_loss", "log loss"),
    "regression": ("mse", "squared error"),
    "counts": ("deviance", "Poisson deviance"),
    "survival": ("cox_loss", "Cox loss"),
}
"""The metric that decides, by the kind of target, and its name; less is better."""
EVALUATE = {
    "linear": evaluate_linear,
    "additive": evaluate_additive,
    "reference": evaluate_trees,
    "tabular": evaluate_network,
}
"""What tunes and predicts, by the model of a method: a function of the table, of the
method, and of a function that returns the seconds left for it. None without time."""


LATE = 5_000_000
"""Inputs of all training rows from which a table is large: its rows are read whenever
they are used, and letters of one split choose the settings of linear methods."""


class Contest:
    """Methods that are tuned and scored alike.

    ``scores`` are those of all methods so far, ``methods`` what ``auto.json`` has of
    each; settings that are known there stay.
    """

    def __init__(self, table: Table, methods: dict[str, dict[str, Any]]):
        self.table, self.methods = table, methods
        self.metric, self.criterion = CRITERIA[table.task.kind]
        if table.task.log_shift is not None:
            self.criterion += " of the logarithm"
        self.scores: dict[str, MethodScores] = {}
        self.begin: Contest | None = None
        """The same methods on the first splits, whose settings are where to begin."""

    @classmethod
    def read(
        cls, request: Request, chosen: Built, tested: Built, methods: dict[str, Any]
    ) -> "Contest":
        """The methods on the splits of a table, or on letters of them.

        Args:
            request: what was asked for.
            chosen: the table's splits with validation rows.
            tested: the same splits, without.
            methods: what is known of each.
        """
        task = chosen.task
        values = chosen.federated_data.train.total * np.prod(task.shape)
        late = values > LATE and not request.once
        read = LateSplit if late else Split.read
        to_choose = [read(one, "validation", task) for one in chosen.federations]
        to_test = [read(one, "test", task) for one in tested.federations]
        table = Table(request, task, chosen, tested, to_choose, to_test, {})
        if late:
            table = table._replace(to_tune=expand_splits(task, to_choose[:1]))
        return cls(read_letters(table) if request.once else table, methods)

    @property
    def is_large(self) -> bool:
        """Whether rows are read whenever they are used."""
        return isinstance(self.table.to_test[0], LateSplit)

    def shorten(self, splits: int) -> "Contest":
        """A contest on the first splits, of which nothing is known.

        One does for a large table of many clients, which are compared over clients.
        """
        if self.is_large and self.table.tested.federated_data.clients >= FEW_CLIENTS:
            splits = 1
        held = self.table.to_choose[:splits], self.table.to_test[:splits]
        few = self.table._replace(to_choose=held[0], to_test=held[1])
        return Contest(few, {})

    @property
    def constants(self) -> list[MethodScores]:
        """The scores of both constant predictions."""
        pairs = (self.table.chosen, "validation"), (self.table.tested, "test")
        both = (measure_constants(*pair) for pair in pairs)
        return [MethodScores(*of) for of in zip(*both, strict=True)]

    @property
    def numbers(self) -> int:
        """The numbers in the letters of a client."""
        return count_numbers(self.table)

    @property
    def settings(self) -> dict[str, Mapping[str, Any]]:
        """The settings that were chosen, by the method."""
        known = self.methods.items()
        return {name: of["setting"] for name, of in known if "setting" in of}

    def takes(self, candidate: Candidate) -> bool:
        """Whether a method is one for such a table."""
        request, task = self.table.request, self.table.task
        if task.kind in candidate.not_for:
            return False
        if candidate.model != "linear" and request.once:
            return False
        if candidate.model == "additive":
            return bool(count_bins(task)) and not self.is_large
        return candidate.deployable or find_spec("sklearn") is not None

    def evaluate(self, candidate: Candidate, left: Callable[[], float]) -> bool:
        """Tune a method, and score it; False if there was no time for it.

        Args:
            candidate: the method.
            left: the seconds that are left for it; raises if the user asked to stop.
        """
        begun, name, settings = time.perf_counter(), candidate.name, self.settings
        table = self.table._replace(settings=settings)
        if self.begin is not None:
            slow = any(not of["tuned"] for of in self.begin.methods.values())
            table = table._replace(begin=self.begin.settings, slow=slow)
        predicted = EVALUATE[candidate.model](table, candidate, left)
        if predicted is None:
            return False
        validated = measure(table.task, table.to_choose, predicted.validation)
        measured = measure(table.task, table.to_test, predicted.test)
        metric = self.metric
        self.scores[name] = MethodScores(validated[metric], measured[metric])
        known = self.methods.setdefault(name, {"title": candidate.title})
        if name not in settings:
            known["tuned"] = predicted.complete
        known["setting"] = dict(predicted.setting)
        known["validation"], known["test"] = (
            comparable_means({one: of[part] for one, of in self.scores.items()})[name]
            for part in range(2)
        )
        known["by_split"] = [mean(of[None]) for of in measured[metric]]
        known["metrics"] = {key: _mean_over(of) for key, of in measured.items()}
        known["metrics"][metric] = known["test"]
        known["splits"] = len(measured[metric])
        known["seconds"] = round(time.perf_counter() - begun, 2)
        return True

    def decide(self) -> tuple[Findings | None, dict[str, str]]:
        """What is found, by the rule; and why methods are not trained.

        Nothing is found without training alone, or without another method.
        """
        constants, data = self.constants, self.table.tested.federated_data
        failed = find_untrained(self.scores, constants)
        trained = {name: of for name, of in self.scores.items() if name not in failed}
        others = [name for name in trained if BY_NAME[name].deployable]
        if ALONE not in others or len(others) < 2:
            return None, failed
        splits = self.table.tested.federations
        counts = np.min([one.splits["test"].counts for one in splits], axis=0)
        names = [data.name(client) for client in range(data.clients)]
        return decide(trained, constants, names, counts >= JUDGED), failed

    def say(
        self,
        found: Findings | None,
        failed: Mapping[str, str],
        left_out: Sequence[str] = (),
    ) -> list[str]:
        """What is found, in words."""
        if found is None:
            return no_verdict(failed)
        scores = {
            name: self.methods[name]["test"]
            for name in self.scores
            if name not in failed
        }
        return sentences(found, scores, self.criterion, left_out, failed)

    def record(
        self, state: dict[str, Any]
    ) -> tuple[Findings | None, dict[str, MethodScores]]:
        """Decide, and write what is found into ``auto.json``; the trained methods."""
        found, failed = self.decide()
        for name, why in failed.items():
            self.methods[name]["not_trained"] = why
        state["verdict"] = self.say(found, failed, state["left_out"])
        state["findings"] = found and found.plain()
        state["deploy"] = found.choice.method if found and found.informative else None
        trained = {name: of for name, of in self.scores.items() if name not in failed}
        if found is None:
            return None, trained
        alone = found.choice.alone
        for name in trained.keys() - {alone}:
            gaps = difference(trained[alone].test, trained[name].test)
            ends = dict(zip(("mean_gain", "low", "high"), interval(gaps), strict=True))
            by_client = gaps.mean(axis=0)
            better, worse = int((by_client > 0).sum()), int((by_client < 0).sum())
            self.methods[name]["gain_over_alone"] = {
                **ends,
                "better": better,
                "worse": worse,
            }
        return found, trained


def _mean_over(values: np.ndarray) -> float | None:
    """The mean over splits and clients of a metric; None where no client has one."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else None
