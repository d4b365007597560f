# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What ``fedblend auto`` deploys on real tables, next to numbers measured elsewhere.

    python auto_tables.py TABLES --jobs 8 --minutes 2 --out found.json

``TABLES`` is a folder of CSV files. Each table has a process of its own, with its share
of the cores. The *distance* of a deployed method is its score less the anchor, in parts
of what the anchor gains over a constant; below 2 % it counts as reached. Some tables
may not be passed on: those whose file is not here are named and left out.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

BAR = 0.02


class Setting(NamedTuple):
    """A table, and what was measured on it elsewhere."""

    file: str
    client: str
    target: str
    drop: tuple[str, ...]
    constant: float
    anchor: float
    """The best score elsewhere; NaN where nothing can be told."""
    regimes: tuple[str, ...]
    """What may be deployed: "alone", "together" or "nothing"."""


EICU = ("apachescore", "predictedhospitalmortality")
TOGETHER, ALONE, NOTHING = ("together",), ("alone",), ("nothing",)
NONE = float("nan")
SETTINGS = {
    "heart": Setting("heart", "center", "disease", (), 0.674, 0.396, TOGETHER),
    "eicu_hospitals": Setting(
        "eicu_demo",
        "hospitalid",
        "hospitaldischargestatus",
        (*EICU, "region"),
        *(0.330, 0.268, TOGETHER),
    ),
    "eicu_regions": Setting(
        "eicu_demo",
        "region",
        "hospitaldischargestatus",
        (*EICU, "hospitalid"),
        *(0.351, 0.297, ALONE),
    ),
    "opt_trial": Setting(
        "opt_trial", "Clinic", "Preg.ended...37.wk", ("PID",), 0.396, 0.332, TOGETHER
    ),
    "contraception": Setting(
        "contraception", "district", "use", ("woman",), 0.659, 0.604, TOGETHER
    ),
    "taxi": Setting("taxi", "company", "tip", (), 0.280, 0.264, (*TOGETHER, *ALONE)),
    "school_ilea": Setting(
        "school_ilea", "school", "exam_score", ("bias",), 162, 101.9, TOGETHER
    ),
    "exam_london": Setting(
        "exam_london", "school", "normexam", ("student",), 1.020, 0.525, TOGETHER
    ),
    "radon": Setting(
        "radon", "county.name", "log.radon", ("county",), 0.845, 0.684, TOGETHER
    ),
    "cheese": Setting(
        "cheese", "RETAILER", "LOG_VOLUME", ("VOLUME", "PRICE"), 0.633, 0.070, ALONE
    ),
    "communities": Setting(
        "communities",
        "state",
        "ViolentCrimesPerPop",
        ("communityName", "countyCode", "communityCode", "fold"),
        *(1.18, 0.360, TOGETHER),
    ),
    "indo_rct": Setting(
        "indo_rct", "site", "outcome", ("id", "bleed"), NONE, NONE, NOTHING
    ),
    "flamby_heart": Setting(
        "heart", "center", "disease", ("slope", "ca", "thal"), NONE, NONE, TOGETHER
    ),
}


def judge(name: str, tables: Path, minutes: float) -> tuple[str, dict[str, Any]]:
    """What is found on a table; nothing without its file."""
    from flamby_heart import score_settings, write_training_rows

    from fedblend.runs.auto.candidates import Request
    from fedblend.runs.auto.comparison import AutoComparison, Screen
    from fedblend.trees import precision
    from fedblend_reproductions.silos.tables import prepare

    known, begun, lines = SETTINGS[name], time.perf_counter(), []

    def say(line: str) -> None:
        lines.append(f"{time.perf_counter() - begun:5.1f} s  {line}")

    with tempfile.TemporaryDirectory() as place, precision("float32"):
        path = tables / f"{known.file}.csv.gz"
        if not path.exists():
            return name, {}
        path = prepare(name, path, Path(place))
        if name == "flamby_heart":
            path = Path(place) / "training.csv"
            write_training_rows(path)
        request = Request(path, known.client, known.target, None, (), known.drop)
        request = request._replace(scale="linear")
        contest = AutoComparison(request, Path(place) / "out", minutes, Screen(say))
        contest.judge()
    state = contest.state
    methods, findings = state["methods"], state["findings"]
    found: dict[str, Any] = {
        "seconds": time.perf_counter() - begun,
        "methods": methods,
        "verdict": state["verdict"],
        "findings": findings,
        "left_out": state["left_out"],
        "said": lines,
    }
    if findings is None:
        return name, found | {"deploy": None, "regime": "none", "score": None}
    choice = findings["choice"]
    alone = choice["method"] == "local_only"
    deploy = choice["alone"] if alone else choice["method"]
    regime = "alone" if alone else "together"
    found |= {"deploy": deploy, "score": methods[deploy]["test"]}
    found["regime"] = regime if findings["informative"] else "nothing"
    if name == "flamby_heart":
        settings = {one: of["setting"] for one, of in methods.items()}
        found["test"] = score_settings(settings)
    return name, found


def line(name: str, of: dict[str, Any]) -> str:
    """A line of the table that is printed."""
    known, score = SETTINGS[name], of["score"]
    distance = (score or NONE) - known.anchor
    distance /= known.constant - known.anchor
    reached = " " if not distance > BAR else "*"
    right = "right" if of["regime"] in known.regimes else "WRONG"
    shown = f"{name:15} {of['deploy']!s:15} {score or NONE:8.4g} {known.anchor:7.4g} "
    shown += f"{100 * distance:+6.1f} %{reached} {of['regime']:9} {right:6} "
    shown += f"{of['seconds']:5.0f} s"
    for test in [of.get("test", {}).get(of["deploy"])] * (name == "flamby_heart"):
        if test:
            by = " ".join(f"{one:.3f}" for one in test["by_hospital"])
            shown += f"  {test['accuracy']:.3f} ({by}) {test['log_loss']:.3f}"
    return shown


def _take_cores(turn: Any, each: int) -> None:
    """Bind this process to its share of the cores."""
    with turn.get_lock():
        place, turn.value = turn.value, turn.value + 1
    cores = sorted(os.sched_getaffinity(0))
    first = place * each % len(cores)
    os.sched_setaffinity(0, set(cores[first : first + each]))


def main() -> None:
    """Judge the tables, and print and write what is found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn, found = multiprocessing.get_context("spawn"), {}
    each = max(len(os.sched_getaffinity(0)) // asked.jobs, 1)
    taken = spawn.Value("i", 0)
    work = partial(judge, tables=asked.tables, minutes=asked.minutes)
    with ProcessPoolExecutor(asked.jobs, spawn, _take_cores, (taken, each)) as pool:
        for name, of in pool.map(work, asked.only):
            if not of:
                print(f"{name}: no file in {asked.tables}")
                continue
            found[name] = of
            print(line(name, of), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(found, indent=1, default=str))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
