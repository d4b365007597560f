# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The bound in the summary of a run of FLIX holds for that run."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.report.page.run_results import read_run, theory_curve
from fedblend.runs.certificates import promise
from fedblend.runs.run import run_config
from fedblend.trees import precision
from tiny_config import TINY

ROUNDS, ALPHA = 12, 0.6


def least_squares(folder: Path) -> dict[str, Any]:
    """A table of five clients whose lines differ, with more rows than inputs."""
    draw = np.random.default_rng(3)
    lines = ["client,a,b,y"]
    for client in range(5):
        slope = draw.normal(size=2) + client / 2
        for a, b in draw.normal(size=(20, 2)):
            y = slope @ (a, b) + 0.1 * draw.normal()
            lines.append(f"{client},{a},{b},{y}")
    file = folder / "table.csv"
    file.write_text("\n".join(lines) + "\n")
    tables = copy.deepcopy(TINY)
    tables["data"] = {"file": str(file), "target": "y", "client": "client"}
    tables["data"] |= {"kind": "regression", "test": 0.2, "partition": "by_key"}
    tables["model"] = {"name": "logistic", "loss": "squared_error"}
    tables["algorithm"] = {"name": "flix", "rate": "theory", "alpha": ALPHA}
    tables["algorithm"] |= {"steps": 1, "batch_size": "all"}
    tables["algorithm"]["personal"] = {"solver": "lbfgs"}
    tables["run"] = {"rounds": ROUNDS, "every": 1, "precision": "float64"}
    return tables


@pytest.mark.slow
def test_the_run_stays_below_its_bound(tmp_path: Path):
    config = check(least_squares(tmp_path), "made")
    summary = run_config(config, tmp_path / "run")
    known = summary["theory"]
    assert 0 < known["factor"] < 1
    found = theory_curve(read_run(tmp_path / "run"))
    assert found is not None and found["round"] == [*range(ROUNDS + 1)]
    pairs = list(zip(found["measured"], found["bound"], strict=True))[:-1]
    assert all(0 < measured <= bound for measured, bound in pairs)
    with precision("float64"):
        start, factor = closed_form(build(config).federated_data)
    # Local models are found to a gradient norm of 1e-5, not exactly.
    assert known["start"] == pytest.approx(start, rel=1e-3)
    assert known["factor"] == pytest.approx(factor, rel=1e-6)


def closed_form(data: Any) -> tuple[float, float]:
    """``L_alpha V/2`` and ``1 - mu_alpha/L_alpha`` of least squares, by NumPy alone."""
    models, smooth, convex = [], [], []
    for client in range(data.clients):
        inputs, targets = (np.asarray(part, float) for part in data.train.rows(client))
        inputs = np.column_stack([inputs, np.ones(len(inputs))])
        models.append(np.linalg.lstsq(inputs, targets.ravel(), rcond=None)[0])
        sizes = np.linalg.eigvalsh(inputs.T @ inputs / len(inputs))
        smooth.append(sizes[-1])
        convex.append(sizes[0])
    apart = np.stack(models) - np.average(models, axis=0, weights=smooth)
    start = ALPHA**2 * np.mean(smooth * (apart**2).sum(axis=1)) / 2
    return float(start), float(1 - np.mean(convex) / np.mean(smooth))


def test_a_step_of_ones_own_has_no_bound(tmp_path: Path):
    tables = least_squares(tmp_path)
    tables["algorithm"]["rate"] = 0.1
    nothing: Any = None
    config = check(tables, "made")
    with precision("float64"):
        assert promise(config, build(config), nothing) == {}
