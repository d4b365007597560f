# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The comparison behind ``fedblend auto``: describe, tune, decide, run, write.

The folder is whole after every step: ``auto.json`` has all that is known so far,
``runs/METHOD`` are ordinary folders of runs, of training alone, of FedAvg and of what
is to be deployed. The same request in the same folder continues where it was
interrupted.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from fedblend.config.build import Built
from fedblend.config.config import Config, dump
from fedblend.errors import RunError
from fedblend.runs import run_folder
from fedblend.runs.auto import candidates, description, sentences
from fedblend.runs.auto.candidates import (
    ALONE,
    BY_NAME,
    CANDIDATES,
    COX,
    Candidate,
    Request,
)
from fedblend.runs.auto.contest import CRITERIA, Contest
from fedblend.runs.auto.folder import AutoResult, method_rows, open_state
from fedblend.runs.auto.insight import insight
from fedblend.runs.auto.kept_runs import (
    START,
    count_affordable,
    keep_run,
    train_on_all_rows,
)
from fedblend.runs.auto.letters import count_entries, divide
from fedblend.runs.auto.survival import (
    add_survival,
    build_rows,
    read_datasets,
    write_survival,
)
from fedblend.simulation.run import Run
from fedblend.trees import precision

REPORT = "report.html"
ALWAYS = (ALONE, "fedavg")
"""Methods whose runs are kept."""
SPLITS, LEAST_SPLITS = 20, 3
"""Splits of a table, and of one that is too large for so many."""
ROWS, PRODUCTS = 1_000_000, 20_000_000
"""What all splits may have together: rows, and entries of the matrices of clients."""
FIRST, FIRST_SECONDS = (*ALWAYS, "own_intercepts"), 6.0
"""Methods of the first answer, which are not left out, however short the time; and the
seconds for their settings."""
LATE = 0.25
"""Part of the time budget after which there is no first answer."""
TUNING = 0.5
"""Part of the time budget for choosing settings."""
TIME = {"linear": 2.0, "additive": 2.0, "reference": 1.0, "tabular": 3.0}
"""Parts of the time for tuning that a method of each model has."""
TELLING = 0.75
"""Part of the time budget that is over before nothing more is told of clients."""
GRACE = 10.0
"""Seconds after the budget in which kept runs may end."""
UNTOLD = "; the verdict does not depend on it, and more --minutes add it"
LEAST_SECONDS = 20.0
"""What kept runs may take, if there is time; more only if the comparison took more."""
SAID = (" columns make ", "that look like an index", "that alone tell the target")
"""In warnings about columns, which are described, or looked at more closely."""
MOST_ENTRIES = 1000
"""Coefficients of a model: Newton's method solves systems of so many equations."""


class Screen(NamedTuple):
    """Callbacks of a comparison: for lines of output, and to see an interrupt."""

    say: Callable[[str], None] = lambda line: None
    stop: Callable[[], None] = lambda: None
    """Raises if the user asked to stop."""


class AutoComparison:
    """A comparison in progress; ``state`` is the content of ``auto.json``."""

    def __init__(self, request: Request, out: Path, minutes: float, screen: Screen):
        self.request, self.out, self.screen = request, out, screen
        self.seconds, self._begun = 60 * minutes, time.perf_counter()
        self._used = time.process_time()
        self.state = open_state(request, out)

    def complete(self) -> dict[str, Any]:
        """Complete the comparison; returns its state."""
        state = self.state
        short = state["left_out"] or state.get("untold")
        more = short and self.seconds > state.get("seconds", 0.0)
        if "seconds" in state and not more:
            self._say(*description.lines(state["seen"]))
            if state["findings"] and not (self.out / REPORT).exists():
                AutoResult(self.out).report(self.out / REPORT)
            return state
        with precision("float32"):
            seeds = self.judge()
            self._run(seeds)
            self._deploy()
        self._write()
        return self.state

    def judge(self) -> list[int]:
        """Look, tune and decide; the seeds of the splits."""
        datasets = read_datasets(self._config("fedavg", [0]), self.request)
        found = description.look_at(self.request, *datasets)
        self.request, self.state["looks"] = found
        built = self._build("fedavg", [0], candidates.VALIDATION)
        if description.are_counts(built, self.request):
            self.request = self.request._replace(kind="counts")
            built = self._build("fedavg", [0], candidates.VALIDATION)
        shift = description.log_shift(built, self.request)
        if shift is not None:
            self.state["log_shift"] = shift
            built = self._build("fedavg", [0], candidates.VALIDATION)
        self._look(built)
        if self.request.once:
            seeds, (chosen, tested) = [0], divide(built)
        else:
            products = built.federated_data.clients * count_entries(built.task) ** 2
            most = min(ROWS // self.state["seen"]["rows"], PRODUCTS // products)
            by_time = self.request.time is not None
            splits = LEAST_SPLITS if by_time else np.clip(most, LEAST_SPLITS, SPLITS)
            seeds = list(range(int(splits)))
            # Of so many rows, those of one split choose settings well.
            name, chosen = "fedavg", built
            if self.state["seen"]["rows"] <= candidates.MOST_ROWS:
                # With ranks of numbers, the inputs of networks; others leave them.
                name = "network"
                chosen = self._build(name, seeds, candidates.VALIDATION)
            tested = self._build(name, seeds, 0.0)
        # Matrices are small: threads would wait for each other.
        with threadpool_limits(1):
            contest = Contest.read(self.request, chosen, tested, self.state["methods"])
            del built, chosen  # which may be large
            criterion = contest.metric, contest.criterion
            self.state["metric"], self.state["criterion"] = criterion
            self._answer_first(contest)
            self._compare(contest)
            self._decide(contest)
        return seeds

    def folder(self, method: str) -> Path:
        """The folder of a method's run."""
        return self.out / "runs" / method

    @property
    def _time(self) -> float:
        return time.perf_counter() - self._begun

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.screen.say(line)

    def _save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        text = run_folder.json_text(self.state)
        run_folder.write_text(self.out / "auto.json", text)

    def _config(self, name: str, seeds: list[int] | int, **options: Any) -> Config:
        known = self.state["methods"].get(name, {})
        setting = known.get("setting", BY_NAME[name].first)
        options["log_shift"] = self.state.get("log_shift")
        return candidates.configuration(
            self.request, name, setting, seeds=seeds, **options
        )

    def _build(self, name: str, seeds: list[int], validation: float) -> Built:
        config = self._config(name, seeds, validation=validation)
        return build_rows(config, self.request)

    def _look(self, built: Built) -> None:
        """Describe the table, and refuse what is not compared."""
        data, kind, state = built.federated_data, built.task.kind, self.state
        if kind not in CRITERIA:
            raise RunError(f"{self.request.target}: {kind} targets are not compared")
        description.check(data, kind, self.request.client, self.request.target)
        entries = count_entries(built.task)
        if entries > MOST_ENTRIES:
            raise RunError(
                f"{self.request.table}: makes {built.task.shape[0]} inputs and a model "
                f"of {entries} coefficients; auto takes at most {MOST_ENTRIES}. "
                "--drop leaves columns out; fedblend compare has methods for larger "
                "models"
            )
        state["kind"] = kind
        state["seen"] = {**description.describe(built), "entries": entries}
        # What becomes of the columns is said below, column by column.
        state["warnings"] = [
            *state.get("looks", ()),
            *description.target_warnings(built, self.request.target),
            *(line for line in built.warnings if not any(of in line for of in SAID)),
        ]
        self._say(*(f"warning: {line}" for line in state["warnings"]))
        self._say(*description.lines(state["seen"]))
        self._save()

    def _answer_first(self, contest: Contest) -> None:
        """Say what the simplest methods tell on few splits, before all are tuned."""
        late = self._time > LATE * self.seconds
        if self.request.once or self.state["methods"] or late:
            return
        few, begun = contest.shorten(LEAST_SPLITS), self._time
        contest.begin = few
        first = [one for one in self._compared(contest) if one.name in FIRST]
        for place, candidate in enumerate(first, 1):
            until = begun + place * FIRST_SECONDS / len(first)
            few.evaluate(candidate, self._left(until))
        what, *_ = few.say(*few.decide())
        if contest.is_large:  # the same rows choose them
            keys = ("title", "setting", "tuned")
            for name, of in few.methods.items():
                if of["tuned"]:
                    contest.methods[name] = {key: of[key] for key in keys}
        self._say(f"first answer, after {self._time:.0f} s: {what}")

    def _compared(self, contest: Contest) -> list[Candidate]:
        """The methods for such a target, the simplest first."""
        if contest.table.task.kind == "survival":
            return [BY_NAME[name] for name in COX]
        return [one for one in CANDIDATES if contest.takes(one)]

    def _compare(self, contest: Contest) -> None:
        """Tune every method, and score it; settings that are known stay."""
        state, compared = self.state, self._compared(contest)
        state["left_out"], state["untold"] = [], []
        self._say(
            f"Comparing {len(compared)} methods by {state['criterion']}, the mean over "
            f"clients and {len(contest.table.to_test)} splits; settings are chosen on "
            "validation rows."
        )
        spent, total = 0.0, sum(TIME[one.model] for one in compared)
        begun = self._time
        for candidate in compared:
            title = candidate.title
            if candidate.name not in FIRST and self._time > TUNING * self.seconds:
                state["left_out"].append(title)
                continue
            spent += TIME[candidate.model]
            until = begun + (TUNING * self.seconds - begun) * spent / total
            if not contest.evaluate(candidate, self._left(until)):
                state["left_out"].append(title)
                continue
            known = state["methods"][candidate.name]
            if not known["tuned"]:
                state["left_out"].append(f"more settings of {title}")
            self._save()
            score = f"test {state['criterion']} {known['test']:.4g}"
            self._say(f"{self._time:5.1f} s  {title}: {score}")

    def _left(self, until: float) -> Callable[[], float]:
        """The seconds of a processor that are left; a busy machine gives fewer."""

        def left() -> float:
            self.screen.stop()
            used = time.process_time() - self._used
            return (until - self._time) * min(used / max(self._time, 1e-9), 1.0)

        return left

    def _decide(self, contest: Contest) -> None:
        """Decide and say so, by the rule and in the words of ``verdict``."""
        state, (found, trained) = self.state, contest.record(self.state)
        if found is None:
            return
        if self.request.once:
            # What is told besides needs rows.
            state["numbers"] = contest.numbers
            state["verdict"].append(sentences.cost(contest.numbers, state["kind"]))
            return
        left = self._left(TELLING * self.seconds)
        if state["kind"] != "survival":
            # The rows that chose settings are of no more use, and may be many.
            table = contest.table
            contest.table = table._replace(chosen=table.tested, to_choose=())
        tables, facts = insight(contest.table, trained, found, contest.settings, left)
        state |= facts
        if state["kind"] == "survival":
            add_survival(state, contest, tables["clients"])
        for name, rows in tables.items():
            self.out.mkdir(parents=True, exist_ok=True)
            run_folder.write_table(self.out / f"{name}.csv", rows)

    def _run(self, seeds: list[int]) -> None:
        """The runs that are kept: training alone, FedAvg, and the choice."""
        found = self.state["findings"]
        if found is None:
            return
        if self.state["kind"] == "survival":
            config = self._config("fedavg", [0])
            write_survival(self.out, config, self.request, self.state)
            return
        done: dict[str, Run] = {}
        # Where time is short, the method of the verdict is what is needed.
        kept = dict.fromkeys([ALONE, found["choice"]["candidate"], *ALWAYS])
        # Runs that are compared have the same splits.
        few = min(self.state["methods"][name]["splits"] for name in kept)
        configs = [self._config(name, seeds, kind=self.state["kind"]) for name in kept]
        rest = self._left(self.seconds + GRACE)
        left = min(rest(), max(self._time, LEAST_SECONDS))
        seen = self.state["seen"]
        fit = count_affordable(configs, seen, left)
        chosen = found["choice"]["method"]
        if not fit:  # that of the verdict may fit by itself
            fit = count_affordable([configs[[*kept].index(chosen)]], seen, left)
            kept = dict.fromkeys([chosen, *kept])
        if 0 < fit < few:
            self._say(f"Kept runs have {fit} of {few} splits, for lack of time.")
        seeds = seeds[: min(few, fit)]
        for place, name in enumerate(kept):
            known = self.state["methods"][name]
            if "not_trained" in known:
                continue
            if not seeds or (place and rest() <= START):
                title = BY_NAME[name].title
                self.state.setdefault("untold", []).append(f"the run of {title}")
                continue
            begun = self._time
            metric, kind = self.state["metric"], self.state["kind"]
            config = self._config(name, seeds, kind=kind, metric=metric)
            far = keep_run(
                name, config, metric, self.folder(name), known, done, self.screen.stop
            )
            known["seconds"] += round(self._time - begun, 2)
            # Folds are other splits than a run's.
            if far is not None and not self.request.once:
                self.state["warnings"].append(far)
                self._say(f"warning: {far}")
            self._save()

    def _deploy(self) -> None:
        """The models to deploy: the method of the verdict, trained on all rows."""
        state, name = self.state, self.state["deploy"]
        if name is None:
            return
        in_rounds = BY_NAME[name].model == "tabular"  # others take no time
        if in_rounds and self._left(self.seconds + GRACE)() <= START:
            state.setdefault("untold", []).append("models that are trained on all rows")
            return
        rows, kind = state["seen"]["rows"], state["kind"]
        if kind != "survival":  # whose models are those of all rows
            config = self._config(name, 0, kind=kind, test=0.0)
            setting, place = state["methods"][name]["setting"], run_folder.DEPLOYED
            train_on_all_rows(name, config, setting, self.out / place)
        state["deployed"] = sentences.deployed(state["findings"]["choice"], rows)
        self._save()

    def _write(self) -> None:
        """The configuration to continue with, the table of methods, and the page."""
        found = self.state["findings"]
        if found is not None and self.state["kind"] != "survival":
            chosen, kind = found["choice"]["method"], self.state["kind"]
            config = self._config(chosen, [0], kind=kind)
            if (folder := self.folder(chosen)).is_dir():
                config = run_folder.read_config(run_folder.Folder(folder))
            run_folder.write_text(self.out / "config.toml", dump(config))
        if untold := self.state.get("untold"):
            line = f"left out for lack of time: {sentences.join_names(untold)}{UNTOLD}"
            self.state["warnings"].append(line)
            self._say(f"warning: {line}")
        run_folder.write_table(self.out / "results.csv", method_rows(self.state))
        self.state["seconds"] = self.seconds
        self._save()
        if found is not None:
            AutoResult(self.out).report(self.out / REPORT)
