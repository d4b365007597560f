# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""`fedblend auto` on real tables with natural clients, next to anchors.

The tables are CSV files of a folder, which are not shipped. The anchors were measured
apart from this library, with all rows in one place: the constant, the best method of
any kind, and the best method that shares no rows. Splits differ from ours by about the
second digit. Prints a line for each table, and writes the runs to a folder:

    python real_tables.py FOLDER --out runs/real --minutes 5

"missed" is how far the deployed method is from an anchor, as a part of the distance
between the constant and that anchor; "own best" is the same for the best row of the
comparison itself, which the rule may not have deployed.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import fedblend as fb
from fedblend.errors import InputError


class Setting(NamedTuple):
    """What is asked of a table, and what is known of it."""

    client: str
    target: str
    drop: tuple[str, ...]
    constant: float
    best: float
    """Of all methods, trees on the rows of all clients included."""
    linear: float
    """Of linear models."""


SETTINGS = {
    "heart": Setting("center", "disease", (), 0.674, 0.396, 0.396),
    "eicu_demo hospitalid": Setting(
        "hospitalid",
        "hospitaldischargestatus",
        ("apachescore", "predictedhospitalmortality", "region"),
        0.330,
        0.268,
        0.268,
    ),
    "eicu_demo region": Setting(
        "region",
        "hospitaldischargestatus",
        ("apachescore", "predictedhospitalmortality", "hospitalid"),
        0.351,
        0.297,
        0.297,
    ),
    "opt_trial": Setting("Clinic", "Preg.ended...37.wk", ("PID",), 0.396, 0.332, 0.332),
    "contraception": Setting("district", "use", ("woman",), 0.659, 0.604, 0.626),
    "taxi": Setting("company", "tip", (), 0.280, 0.264, 0.2761),
    "school_ilea": Setting("school", "exam_score", ("bias",), 162.0, 101.9, 102.0),
    "exam_london": Setting("school", "normexam", ("student",), 1.020, 0.525, 0.531),
    "radon": Setting("county.name", "log.radon", ("county",), 0.845, 0.684, 0.684),
    "cheese": Setting(
        "RETAILER", "LOG_VOLUME", ("VOLUME", "PRICE"), 0.633, 0.070, 0.0741
    ),
    "communities": Setting("state", "ViolentCrimesPerPop", (), 1.18, 0.360, 0.434),
    "indo_rct": Setting("site", "outcome", ("id", "bleed"), np.nan, np.nan, np.nan),
}


def read_table(folder: Path, name: str, target: str) -> pd.DataFrame:
    """A table; crimes on the log scale, without what counts them in another way."""
    table: Any = pd.read_csv(folder / f"{name.split()[0]}.csv.gz")
    if name == "communities":
        first = list(table.columns).index("murders")
        leaks = [one for one in table.columns[first:] if one != target]
        table = table.drop(
            columns=[*leaks, "communityName", "countyCode", "communityCode", "fold"]
        )
        table = table[table[target] > 0].dropna(axis=1, thresh=len(table) // 2)
        table[target] = np.log(table[target])
    return table


def missed(score: float, constant: float, anchor: float) -> str:
    """How much of the distance to an anchor a score does not go."""
    return f"{(score - anchor) / (constant - anchor):+.1%}"


def main():
    """Compare on the tables that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    for name in asked.tables:
        of, place = SETTINGS[name], asked.out / name.replace(" ", "_")
        begun = time.perf_counter()
        try:
            found = fb.auto(
                read_table(asked.folder, name, of.target),
                client=of.client,
                target=of.target,
                drop=of.drop,
                minutes=asked.minutes,
                out=place,
                quiet=True,
            )
        except InputError as error:
            print(f"{name}: {error}", flush=True)
            continue
        seconds = time.perf_counter() - begun
        key = f"test_{found.metric}"
        scores = {row["method"]: row[key] for row in found.table if row[key] != ""}
        deployed = scores.get(found.deploy or "local_only", np.nan)
        print(f"{name}: {found.deploy}, {seconds:.0f} s")
        print("  " + ", ".join(f"{way} {value:.4g}" for way, value in scores.items()))
        print(
            f"  constant {of.constant:g}, best {of.best:g}, linear {of.linear:g}; "
            f"missed {missed(deployed, of.constant, of.best)} of best, "
            f"{missed(deployed, of.constant, of.linear)} of linear; own best "
            f"{missed(min(scores.values()), of.constant, of.best)}"
        )
        print(*(f"  {line}" for line in found.verdict), sep="\n", flush=True)


if __name__ == "__main__":
    main()
