# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend tune``: what it prints and writes, and what it refuses."""

import csv
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from fedblend.cli import main, screen
from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check, load
from fedblend.runs.tune import tune_config
from fedblend.simulation.simulate import set_up
from fedblend.theory.constants import stack_models
from fedblend.trees import precision
from planned import FLIX, changed
from tiny_config import TINY

GRID = [0.0, 0.3, 1.0]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    content = deepcopy(TINY)
    content["data"]["classes"] = 4
    content["algorithm"] |= {"name": "apfl", "alpha": 0.9, "learn": "fixed"}
    content["measure"]["metrics"] = ["loss"]
    content["run"]["rounds"] = 1  # whoever is not in the cohort has the shared model
    Path("apfl.toml").write_text(toml.write(content))
    return tmp_path


@pytest.mark.slow
def test_what_is_chosen_and_written(place, capsys, compiled):
    arguments = ["--folds", "2", "--alphas", "0,.3", "--out", "tuned.csv"]
    assert main(["tune", "apfl.toml", *arguments]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert max(map(len, said.out.splitlines())) <= 80
    with open("tuned.csv") as file:
        clients = list(csv.DictReader(file))
    arms = ["alone", "0", "0.3", "1"]
    table = {
        cells[0]: cells for cells in map(str.split, said.out.splitlines()) if cells
    }
    for arm in arms:
        values = [float(row[f"folds_loss_at_{arm}"]) for row in clients]
        assert table[arm][1] == f"{np.mean(values):.4f}"
        assert table[arm][3] == str([row["arm"] for row in clients].count(arm))
    for row in clients:
        alpha = float(row["alpha"])
        assert alpha == 0 if row["arm"] == "alone" else 0 <= alpha <= 1
        assert float(row["expected_harm"]) >= 0
        assert row["why"] in ("own rows", "others", "guard")
    again = load(Path("tuned/config.toml"))
    assert again.algorithm.alpha == [float(row["alpha"]) for row in clients]
    assert "models: fedblend predict tuned TABLE.csv" in said.out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--alphas", "0,2"], "--alphas: '2' is not a number in [0, 1]"),
        (["--alphas", "0,few"], "--alphas: 'few' is not a number in [0, 1]"),
        (["--alphas", ""], "--alphas: '' is not a number in [0, 1]"),
        (["--out", "no/new.csv"], "no: is not a folder, where new.csv could"),
        (["--by", "auc"], "--by: 'auc' is not measured; it is one of ['loss']"),
        (["--folds", "1"], "--folds: 1 is not a whole number of at least 2"),
        (["--folds", "999"], "folds: no client has 999 training rows or more"),
        (["--set", "run.seed=[1, 2]"], "run.seed: has several seeds, but"),
        (["--set", "run.cohort=9"], "run.cohort: 9 is not between 1 and the 6 clients"),
        (["--set", "algorithm.learn=step"], 'algorithm.learn: is "step", so alpha mov'),
        (["--set", "algorithm={name='fedavg', rate=0.1, steps=1, batch_size=4}"],
         'algorithm.name: "fedavg" mixes no models'),
        (["--set", "algorithm={name='mapper', rate=0.1, steps=1, batch_size=4}"],
         "algorithm.grid: is 11, so alpha is chosen while training"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, line, place, capsys):
    assert main(["tune", "apfl.toml", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert line in said.err
    assert [path.name for path in place.iterdir()] == ["apfl.toml"]


@pytest.mark.slow
def test_every_alpha_has_the_rate_of_theory():
    """A replica of the sweep is the run with that alpha and its own 1/L_alpha."""
    server = "algorithm.server={name='nesterov'}"
    settings = ("run.rounds=5", server)
    config = check(changed(FLIX, *settings), "here")
    found, *_ = tune_config(config, [0.0, 0.1, 0.7], folds=2)
    with precision("float64"):
        own = build(check(changed(FLIX, *settings, "algorithm.alpha=0.1"), "here"))
        alone = set_up(own.spec).complete()
    run = found.arms[2].run  # after training alone and alpha = 0
    swept = stack_models(run.shared)[1]
    np.testing.assert_allclose(swept, stack_models(alone.shared).ravel(), rtol=1e-8)
