# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A run on a raw table: text, dates, truth values, numbers, some of them missing."""

from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config.config import check
from fedblend.runs.run import run_config

ROWS = 90
HOSPITALS = ("north", "south", "far east")


def table(rows: int = ROWS) -> dict[str, np.ndarray]:
    """The columns of a table."""
    draw = np.random.default_rng(0)
    age = draw.normal(60, 15, rows)
    sex = draw.choice(["f", "m"], rows).astype(object)
    dead = (age - 60) / 15 + (sex == "m") + draw.normal(0, 0.3, rows) > 0.5
    age[draw.random(rows) < 0.1] = np.nan
    ward = draw.choice(["icu", "er", "ward 3"], rows).astype(object)
    ward[draw.random(rows) < 0.15] = None
    day = np.datetime64("2023-01-05T00:00", "m")
    return {
        "hospital": np.array([HOSPITALS[row % 3] for row in range(rows)], object),
        "age": age,
        "sex": sex,
        "ward": ward,
        "admitted": day + draw.integers(0, 10**6, rows).astype("timedelta64[m]"),
        "smoker": draw.choice(np.array([True, False, None], object), rows),
        "stays": draw.integers(0, 9, rows),
        "outcome": np.where(dead, "died", "lived").astype(object),
    }


def write_csv(columns: dict[str, np.ndarray], path: Path) -> Path:
    """A CSV file of the columns; what is missing is empty."""
    lines = [",".join(columns)]
    for row in zip(*(column.tolist() for column in columns.values()), strict=True):
        lines.append(",".join("" if v is None or v != v else str(v) for v in row))
    path.write_text("\n".join(lines) + "\n")
    return path


def run_mixed(folder: Path, **algorithm: Any) -> Path:
    """Run a small configuration on the table; the folder of the run."""
    tables = {
        "version": 1,
        "name": "mixed",
        "data": {
            "file": str(write_csv(table(), folder / "mixed.csv")),
            "client": "hospital",
            "target": "outcome",
            "partition": "by_key",
            "test": 0.3,
        },
        "model": {"name": "mlp", "hidden": [5]},
        "algorithm": {"rate": 0.1, "steps": 3, "batch_size": 10, **algorithm},
        "run": {"rounds": 4, "every": 2},
        "measure": {"local": 2},
    }
    run_config(check(tables, "here"), folder / "run")
    return folder / "run"
