# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The guard on real regressions: whom it harms, and whether it states its harm.

Tables with natural clients, as CSV files of a folder, which are not shipped: see TABLES
for their columns. Linear regression by APFL, half of every client's rows are test rows.
Targets have variance 1. Prints a line for each table and way:

    python guard_tables.py FOLDER --seeds 0 1

"plain" harm is the mean over clients of what the test rows say; their noise alone makes
it positive, so that it is too large. "halved" takes one half of the rows to say who is
harmed and the other by how much; it is too small where a harm is within the noise. What
is expected lies between. "surely" counts clients that are harmed by a paired t-test at
2.5 %, for the worse of two rivals, with 5 % false discoveries.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from nobody_harmed import discoveries
from scipy.stats import ttest_1samp

from fedblend.config.config import check
from fedblend.runs.tune import tune_config
from fedblend.selection.arms import row_metrics
from fedblend.selection.choose import GRID

TABLES = {
    "school_ilea": ("school", "exam_score", ["bias"]),
    "exam_london": ("school", "normexam", ["student"]),
    "cheese": ("RETAILER", "LOG_VOLUME", ["VOLUME", "PRICE"]),
    "radon": ("county.name", "log.radon", ["county"]),
    "communities": ("state", "ViolentCrimesPerPop", []),
}
"""The column of clients, the target, and columns that are no inputs."""
RATES = {"communities": 0.001}
"""Where 0.03 diverges."""
HALVES = 10


def prepared(folder, name, place):
    """A table with a target of variance 1, and without what leaks it."""
    client, target, drop = TABLES[name]
    table: Any = pd.read_csv(folder / f"{name}.csv.gz")
    if name == "communities":
        first = list(table.columns).index("murders")
        others = [one for one in table.columns[first:] if one != target]
        drop = [*others, "communityName", "countyCode", "communityCode", "fold"]
        numbers = table.columns.drop(["communityName", client])
        table[numbers] = table[numbers].apply(pd.to_numeric, errors="coerce")
        table = table[table[target] > 0].dropna(axis=1, thresh=len(table) // 2)
        table[target] = np.log(table[target])
    if name == "school_ilea":  # a table of numbers alone is taken as it is
        table[["fsm_percent", "vr1_percent"]] /= 100
    table = table.drop(columns=[one for one in drop if one in table])
    table[target] = (table[target] - table[target].mean()) / table[target].std()
    path = place / f"{name}.csv"
    table.to_csv(path, index=False)
    return {
        "name": name,
        "data": {"file": str(path), "target": target, "client": client, "test": 0.5},
        "model": {"name": "logistic", "loss": "squared_error"},
        "algorithm": {
            "name": "apfl",
            "alpha": 0.5,
            "learn": "fixed",
            "rate": RATES.get(name, 0.03),
            "steps": 10,
            "batch_size": 10,
        },
        "run": {"rounds": 50, "every": 50},
        "measure": {"splits": ["test"]},
    }


def judged(mine, rivals, rng):
    """Of one client: its harm in two ways, and how sure it is."""
    gaps = mine - rivals
    plain, halved = max(gaps.mean(axis=1).max(), 0), 0.0
    for _ in range(HALVES):
        halves = np.array_split(rng.permutation(len(mine)), 2)
        for one, other in (halves, halves[::-1]):
            rival = gaps[:, one].mean(axis=1).argmax()
            if gaps[rival, one].mean() > 0:
                halved += gaps[rival, other].mean() / HALVES / 2
    sure: list[Any] = [
        1.0 if np.ptp(gap) == 0 else ttest_1samp(gap, 0, alternative="greater")[1]
        for gap in gaps
    ]
    return plain, halved, min(2 * min(sure), 1.0), mine.mean()


def ways_of(found):
    """Test rows of every way, [clients] lists; and what it states of its harm."""
    counts = found.federated_data.test.counts
    arms = {}
    for arm in found.arms:
        by_row = arm.run.evidence.by_row[arm.replica or 0]
        rows = by_row["test"]["personal"][found.metric]
        arms[arm.name] = [
            np.asarray(own, float)[:n] for own, n in zip(rows, counts, strict=True)
        ]
    metric = found.arms[0].run.evidence.metrics[found.metric]
    clients = range(len(counts))
    arms["deployed"] = row_metrics(
        map(found.personal, clients), found.federated_data.test, metric
    )
    return arms


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    asked = parser.parse_args()
    for name in asked.tables:
        every, stated = {}, []
        for seed in asked.seeds:
            with tempfile.TemporaryDirectory() as place:
                tables = prepared(asked.folder, name, Path(place))
                tables["run"]["seed"] = tables["data"]["seed"] = seed
                found, _, _ = tune_config(check(tables, name), list(GRID), by="mse")
            arms = ways_of(found)
            rng = np.random.default_rng(0)
            known = [i for i, rows in enumerate(arms["alone"]) if len(rows) > 3]
            stated.append(found.harm[known].mean())
            for way, rows in arms.items():
                rivals = [np.stack([arms["alone"][i], arms["1"][i]]) for i in known]
                every.setdefault(way, []).extend(
                    judged(rows[i], own, rng)
                    for i, own in zip(known, rivals, strict=True)
                )
        found = {way: np.array(rows) for way, rows in every.items()}
        fixed = min(
            (way for way in found if way not in ("alone", "deployed")),
            key=lambda way: found[way][:, 3].mean(),
        )
        for way in ("alone", "1", fixed, "deployed"):
            plain, halved, p, mean = found[way].T
            said = f", stated {np.mean(stated):.4f}" if way == "deployed" else ""
            print(
                f"{name} {way}: mse {mean.mean():.4f}, harm {halved.mean():.4f} halved,"
                f" {plain.mean():.4f} plain, surely {discoveries(p).sum()} of {len(p)}"
                f"{said}",
                flush=True,
            )


if __name__ == "__main__":
    main()
