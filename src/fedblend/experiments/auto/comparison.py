# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The comparison behind ``fedblend auto``: look, plan, tune, run, decide, write.

The folder is whole after every step: ``auto.json`` has all that is known so far,
``runs/METHOD`` are ordinary folders of runs. The same request in the same folder goes
on where it was interrupted.
"""

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.config.build import Built, build
from fedblend.config.config import Config, dump
from fedblend.errors import RunError
from fedblend.experiments import run_folder
from fedblend.experiments.auto import budget, candidates, description, table, verdict
from fedblend.experiments.auto.budget import Plan
from fedblend.experiments.auto.candidates import (
    ALONE,
    Alone,
    Candidate,
    Point,
    Request,
)
from fedblend.experiments.auto.decision import decide
from fedblend.experiments.auto.tuning import Tuned, trained_alone, tune
from fedblend.experiments.run import run_config
from fedblend.metrics.registry import STANDARD
from fedblend.simulation.run import Run
from fedblend.trees import precision

FORMAT = 1
CRITERIA = {
    "binary": ("log_loss", "log loss"),
    "classes": ("log_loss", "log loss"),
    "regression": ("mse", "squared error"),
}
"""The metric that decides, by the kind of target, and its name; less is better."""
REPORT = "report.html"
ALWAYS = ("local_only", "fedavg")
"""Methods that are not left out, however short the time."""
ENOUGH = 0.7
"""A method begins if this part of what the longest one took is left."""


class Screen(NamedTuple):
    """How a comparison speaks, and how it learns that it is to stop."""

    say: Callable[[str], None] = lambda line: None
    stop: Callable[[], None] = lambda: None
    """Raises if the user asked to stop."""


class Comparison:
    """A comparison in progress; ``state`` is the content of ``auto.json``."""

    def __init__(self, request: Request, out: Path, minutes: float, screen: Screen):
        self.request, self.out, self.screen = request, out, screen
        self.seconds, self._begun = 60 * minutes, time.perf_counter()
        self.state = _opened(request, out)
        self._metrics: tuple[str, ...] | None = None
        self._alone: Run | None = None

    def complete(self) -> dict[str, Any]:
        """Do what is not done yet; returns the state."""
        state = self.state
        more = state["left_out"] and self.seconds > state.get("seconds", 0.0)
        if state.get("verdict") and not more:
            self._say(*description.lines(state["seen"]))
            if not (self.out / REPORT).exists():
                table.write_report(self.out, self.out / REPORT)
            return state
        state["left_out"] = []
        with precision("float32"):
            first = build(self._config(candidates.BY_NAME["fedavg"], [0]))
            self._look(first)
            plan = self._plan(first)
            seeds = list(range(plan.seeds))
            built = build(self._config(candidates.BY_NAME["fedavg"], seeds))
            for place, candidate in enumerate(candidates.CANDIDATES):
                share = (place + 1) / len(candidates.CANDIDATES)
                self._method(candidate, built, plan, share)
            self._decide(built)
        self._write()
        return self.state

    def folder(self, method: str) -> Path:
        """The folder of a method's run."""
        return self.out / "runs" / method

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._begun

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.screen.say(line)

    def _save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        text = run_folder.as_json(self.state)
        run_folder.write_text(self.out / "auto.json", text)

    def _config(self, candidate: Candidate, seeds: list[int]) -> Config:
        """A candidate's configuration at the first point of its grid."""
        point = candidates.grid(candidate, 4)[0]
        return self._configuration(candidate, point, seeds=seeds, rounds=1)

    def _configuration(
        self, candidate: Candidate, point: Point, **options: Any
    ) -> Config:
        return candidates.configuration(
            self.request, candidate, point, metrics=self._metrics, **options
        )

    def _look(self, built: Built) -> None:
        """Say what the table is like, and by which criterion methods are compared."""
        data, kind = built.federated_data, built.task.kind
        if kind not in CRITERIA:
            raise RunError(f"{self.request.target}: {kind} targets are not compared")
        description.check(data, kind, self.request.client, self.request.target)
        metric, self.state["criterion"] = CRITERIA[kind]
        self.state["metric"] = metric
        self._metrics = tuple(dict.fromkeys([metric, *STANDARD[kind]]))
        self.state["seen"] = description.describe(built)
        self._say(*description.lines(self.state["seen"]))

    def _plan(self, built: Built) -> Plan:
        """The plan of an interrupted comparison, or one that fits the time."""
        state, methods = self.state, len(candidates.CANDIDATES)
        if "plan" not in state:
            speed = budget.measured_speed(built)
            left, clients = self.seconds - self._elapsed, built.federated_data.clients
            plan = budget.plan_for(left, speed, methods, clients)
            state["plan"], state["cuts"] = plan._asdict(), budget.cuts(plan)
            state["speed"] = speed._asdict()
            self._save()
        plan = Plan(**state["plan"])
        cut = f" To fit the time: {state['cuts']}." if state["cuts"] else ""
        self._say(
            f"Comparing {methods} methods by {state['criterion']}, the mean over "
            f"clients: {plan.seeds} splits, each method tuned over {plan.grid} "
            f"settings on validation rows, about {plan.rounds} rounds.{cut}"
        )
        return plan

    def _method(
        self, candidate: Candidate, built: Built, plan: Plan, share: float
    ) -> None:
        """Tune a method and run it, unless that is done, or there is no time for it."""
        name, begun = candidate.name, self._elapsed
        known = self.state["methods"].get(name, {"title": candidate.title})
        if "test" in known:
            return
        took = [of.get("seconds", 0.0) for of in self.state["methods"].values()]
        left = self.seconds - begun
        if name not in ALWAYS and left < ENOUGH * max(took, default=0.0):
            self.state["left_out"].append(candidate.title)
            return
        self.state["methods"][name] = known
        if "tuned" not in known:
            known["tuned"] = self._tuned(candidate, built, plan, share).plain()
            self._save()
        tuned = Tuned.of(known["tuned"])
        config = self._configuration(
            candidate,
            tuned.point,
            seeds=list(range(plan.seeds)),
            rounds=tuned.rounds,
            alone=self._trained_alone(),
        )
        if self._alone is None:
            self._alone = self._run_alone(built, plan)
        summary = run_config(
            config,
            self.folder(name),
            resume=True,
            on_step=lambda step: self.screen.stop(),
            local=None if name == ALONE else self._alone,
            figures=False,
        )
        known |= table.numbers(summary, built.federated_data.clients, self._metric)
        known["seconds"] = round(self._elapsed - begun, 2)
        self._save()
        score = f"test {self.state['criterion']} {known['test']:.4g}"
        self._say(f"{self._elapsed:5.1f} s  {candidate.title}: {score}")

    @property
    def _metric(self) -> str:
        return self.state["metric"]

    def _tuned(
        self, candidate: Candidate, built: Built, plan: Plan, share: float
    ) -> Tuned:
        def on_block() -> bool:
            self.screen.stop()
            return self._elapsed < budget.SHARE * share * self.seconds

        return tune(
            self._config(candidate, list(range(plan.seeds))),
            candidate,
            built,
            size=plan.grid,
            rounds=plan.rounds,
            metric=self._metric,
            on_block=on_block,
        )

    def _trained_alone(self) -> Alone:
        """How clients train alone, which is tuned first."""
        tuned = Tuned.of(self.state["methods"][ALONE]["tuned"])
        return Alone(tuned.point.rate, tuned.rounds)

    def _run_alone(self, built: Built, plan: Plan) -> Run:
        """Every client trained alone, once for all methods that it is compared with."""
        tuned = Tuned.of(self.state["methods"][ALONE]["tuned"])
        config = self._configuration(
            candidates.BY_NAME[ALONE],
            tuned.point,
            seeds=list(range(plan.seeds)),
            rounds=tuned.rounds,
        )
        return trained_alone(config, built, tuned, self._metric)

    def _decide(self, built: Built) -> None:
        """Decide by the rule of ``decision``, in the words of ``verdict``."""
        state, methods = self.state, self.state["methods"]
        finished = [name for name, of in methods.items() if "test" in of]
        folders = {name: self.folder(name) for name in finished}
        found, gains = decide(folders, built, self._metric)
        for one in gains:
            methods[one.name]["gain_over_alone"] = one.row()
        tested = {name: methods[name]["test"] for name in finished}
        # JSON has null where a model is not finite.
        scores = {n: math.inf if of is None else of for n, of in tested.items()}
        unfinished = [
            methods[name]["title"]
            for name in finished
            if methods[name]["tuned"]["rounds"] == methods[name]["tuned"]["tried"]
        ]
        said = verdict.sentences(
            found, scores, state["criterion"], state["left_out"], unfinished
        )
        state["findings"] = found.plain()
        state["deploy"] = found.choice.method if found.informative else None
        state["verdict"] = list(said)

    def _write(self) -> None:
        """The configuration to go on with, the table of methods, and the page."""
        chosen = self.state["findings"]["choice"]["method"]
        config = run_folder.read_config(run_folder.Folder(self.folder(chosen)))
        run_folder.write_text(self.out / "config.toml", dump(config))
        run_folder.write_table(self.out / "results.csv", table.rows(self.state))
        self.state["seconds"] = self.seconds
        self._save()
        table.write_report(self.out, self.out / REPORT)


def _opened(request: Request, out: Path) -> dict[str, Any]:
    """What is known of a comparison: nothing, or what the folder has."""
    if not request.table.is_file():
        raise RunError(f"{request.table}: no such file")
    digest = hashlib.sha256(request.table.read_bytes()).hexdigest()
    place = str(request.table.absolute())
    asked = {**request._asdict(), "table": place, "sha256": digest}
    path = out / "auto.json"
    if not path.exists():
        if out.exists() and (not out.is_dir() or (out / "config.toml").exists()):
            raise RunError(f"{out}: holds something else; --out names another folder")
        return {"format": FORMAT, "request": asked, "methods": {}, "left_out": []}
    state = run_folder.read_json(path)
    for key, value in asked.items():
        there = (state.get("request") or {}).get(key)
        if there != value:
            raise RunError(
                f"{out}: holds a comparison with another {key}: {there} there, {value} "
                "here; --out names another folder"
            )
    return state
