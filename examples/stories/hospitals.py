# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Hospitals: from a raw table to a decision.

Twenty made-up hospitals hold admissions with dates, texts and missing values; the
outcome is to be predicted. The table goes in as it is.

    python examples/stories/hospitals.py [FOLDER]     everything goes to FOLDER
"""

import csv
import os
import sys
from pathlib import Path

import numpy as np
from made_up_hospitals import hospitals, write_table
from matplotlib.figure import Figure

import fedblend as fb

TINY = os.environ.get("FEDBLEND_TINY") == "1"
CLIENTS, ROWS = (6, 120) if TINY else (20, 500)
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
OUT.mkdir(parents=True, exist_ok=True)
if not (OUT / "hospitals.csv").exists():
    write_table(OUT / "hospitals.csv", hospitals(clients=CLIENTS, rows=ROWS))

# --- auto
found = fb.auto(
    OUT / "hospitals.csv",
    client="hospital",
    target="outcome",
    out=OUT / "runs",
)
print(*found.verdict, sep="\n")
# --- end


# --- gains
def gains(method: str) -> dict[str, float]:
    """What every hospital gains in test loss over training alone, mean over splits."""
    of: dict[str, list[float]] = {}
    with (found.folder / "runs" / method / "clients.csv").open() as file:
        for row in csv.DictReader(file):
            alone, own = row["test_local_log_loss"], row["test_personal_log_loss"]
            gain = float(alone) - float(own)
            of.setdefault(row["name"], []).append(gain)
    return {name: float(np.mean(values)) for name, values in of.items()}


# --- end


def gains_figure() -> Figure:
    """Gains of the hospitals by FedAvg and the method to deploy, sorted by the latter.

    ``auto`` keeps these two runs, and that of training alone.
    """
    kept = {folder.name for folder in (found.folder / "runs").iterdir()}
    compared = [row["method"] for row in found.table if row["method"] in kept]
    methods = [method for method in compared if method != "local_only"]
    by_method = {method: gains(method) for method in methods}
    first = found.deploy if found.deploy in by_method else methods[0]
    names = sorted(by_method[first], key=by_method[first].__getitem__)
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    for method, marker in zip(methods, "os^Dv<>", strict=False):
        values = [by_method[method][name] for name in names]
        axes.plot(values, names, marker, label=found.titles[method], alpha=0.7)
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_xlabel("test log loss gained over training alone")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


print("| method | AUC | log loss | gain over alone | better | worse |")
print("|---|---|---|---|---|---|")
for row in found.table:
    gain = "" if row["mean_gain"] in ("", None) else f"{row['mean_gain']:+.3f}"
    scores = f"{row['test_auc']:.3f} | {row['test_log_loss']:.3f}"
    print(f"| {row['method']} | {scores} | {gain} | {row['better']} | {row['worse']} |")
gains_figure().savefig(OUT / "hospitals_gains.png", dpi=110)
