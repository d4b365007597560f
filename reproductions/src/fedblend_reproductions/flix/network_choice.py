# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9's choice of settings, on validation rows and over all seeds.

FLIX tries as many settings as models without mixing do, and as many as fine-tuning and
training alone. All are tried for some rounds, and as many of each side are carried on.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend_reproductions.cache import NotCached
from fedblend_reproductions.flix import network_runs as runs
from fedblend_reproductions.flix.network_task import (
    ALPHAS,
    FEW,
    MANY,
    Plan,
    Score,
    Setting,
    Task,
)

KINDS = (FEW, MANY)


class Row(NamedTuple):
    """A setting run to the end, a score for each seed.

    ``words`` say what was chosen, ``tried`` is among how many settings.
    """

    words: str
    tried: int
    scores: list[Score]

    @property
    def validation(self) -> float:
        """Accuracy on validation rows; a seed that diverged has none right."""
        return float(np.mean(np.nan_to_num([one.validation for one in self.scores])))

    @property
    def test(self) -> float:
        """Accuracy on test rows, by examples."""
        return float(np.mean([score.test[-1] for score in self.scores]))

    @property
    def clients(self) -> np.ndarray:
        """Each client's accuracy on its test rows, [seeds, clients]."""
        return np.array([score.clients for score in self.scores])

    def numbers(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "chosen": self.words,
            "settings_tried": self.tried,
            "validation": self.validation,
            "test_by_examples": self.test,
            "rounds": self.scores[0].rounds,
            "test_by_examples[seed][record]": [score.test for score in self.scores],
            "test_by_client[seed][client]": self.clients,
        }


class Outcome(NamedTuple):
    """What was run to the end, and what was tried.

    ``flix`` and ``shared`` (alpha 1) have every setting that was carried on; ``trial``
    has validation accuracies of all settings after the trial. All are without the
    solver of one gradient a round that is not wholly cached, see ``cache.read_only``.
    """

    flix: dict[Setting, Row]
    shared: dict[Setting, Row]
    finetuned: Row
    alone: Row
    trial: dict[Setting, float]

    def ran(self, solver: str) -> bool:
        """Whether a solver of FLIX is among what was run to the end."""
        return any(setting.solver == solver for setting in self.flix)


def flix_settings(plan: Plan, solver: str) -> list[Setting]:
    """Every alpha with every x_i at every rate."""
    work, power = (plan.local, 2) if solver == runs.LOCAL else (plan.one, plan.power)
    assert work is not None
    return [
        Setting(solver, own, alpha, rate / alpha**power)
        for alpha in ALPHAS
        for own in KINDS
        for rate in work.rates
    ]


def control_settings(plan: Plan, solver: str) -> list[Setting]:
    """The same code with alpha 1, which starts at the mean of x_i."""
    rates = plan.shared_rates[1::2] if solver == runs.LOCAL else plan.one_rates
    return [Setting(solver, own, 1.0, rate) for own in KINDS for rate in rates]


def fedavg_settings(plan: Plan) -> list[Setting]:
    """FedAvg's rates."""
    return [Setting(runs.FEDAVG, "", 1.0, rate) for rate in plan.shared_rates]


def by_setting(scores: runs.Scores) -> dict[Setting, list[Score]]:
    """The scores of every setting, by seed."""
    found: dict[Setting, list[Score]] = {}
    for (setting, _), score in scores.items():
        found.setdefault(setting, []).append(score)
    return found


def ranked(
    trial: dict[Setting, float], settings: Iterable[Setting], most: int | None = None
) -> list[Setting]:
    """So many settings, the best on validation rows first."""
    return sorted(settings, key=lambda setting: -trial[setting])[:most]


def of_each_alpha(
    trial: dict[Setting, float], settings: Iterable[Setting], most: int
) -> list[Setting]:
    """The best setting of each of so many alphas, the best alpha first."""
    first: dict[float, Setting] = {}
    for setting in ranked(trial, settings):
        first.setdefault(setting.alpha, setting)
    return list(first.values())[:most]


def measured(task: Task, folder: Path) -> Outcome:
    """Try everything, and run the best of it to the end."""
    plan = task.plan
    alone, models = runs.own_models(task, folder)
    flix: dict[Setting, Row] = {}
    shared: dict[Setting, Row] = {}
    trial: dict[Setting, float] = {}

    def halved(run: Callable, families: Sequence[tuple[list[Setting], Any]]) -> None:
        """Try all of some families, and run to the end what each carries on."""
        everything = [one for family, _ in families for one in family]
        found = {
            setting: Row("", 0, scores).validation
            for setting, scores in by_setting(run(everything, plan.trial)).items()
        }
        tried = {
            one: len(family)
            for family, choose in families
            for one in choose(found, family)
        }
        for one, scores in by_setting(run(list(tried), plan.rounds)).items():
            rows = flix if one.alpha < 1 else shared
            rows[one] = Row(words(one), tried[one], scores)
        trial.update(found)

    def fedavg(settings, rounds):
        return runs.fedavg(task, settings, rounds, folder)

    def mixed(settings, rounds):
        return runs.together(task, settings, rounds, folder, models)

    def of_solver(solver: str, controls: int) -> Sequence[tuple[list[Setting], Any]]:
        return (
            (flix_settings(plan, solver), partial(of_each_alpha, most=plan.carried)),
            (control_settings(plan, solver), partial(ranked, most=controls)),
        )

    halved(fedavg, [(fedavg_settings(plan), partial(ranked, most=plan.carried - 1))])
    best = max(shared, key=lambda one: shared[one].validation)
    tuned = _snapshots(runs.finetuned(task, best, folder), plan.tune.steps)
    halved(mixed, of_solver(runs.LOCAL, 1))
    if plan.one is not None:
        with suppress(NotCached):
            halved(mixed, of_solver(runs.ONE, plan.carried))
    single = {rate: [[one] for one in scores] for rate, scores in alone.items()}
    alone_row = _snapshots(single, plan.own.steps)
    return Outcome(flix, shared, tuned, alone_row, trial)


def _snapshots(found: dict[float, list[list[Score]]], steps: int) -> Row:
    """The best rate and number of steps, of scores by rate, snapshot and seed."""
    count = sum(map(len, found.values()))
    rows = [
        Row(f"{steps * number} steps, rate {rate:g}", count, scores)
        for rate, those in found.items()
        for number, scores in enumerate(those, start=1)
    ]
    return max(rows, key=lambda row: row.validation)


def words(setting: Setting) -> str:
    """A setting for a table."""
    own = f", x_i after {setting.own} steps" if setting.own else ""
    alpha = f"alpha {setting.alpha:g}, " if setting.own else ""
    return f"{alpha}{setting.solver}, rate {setting.rate:.3g}{own}"
