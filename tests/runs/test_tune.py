# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What ``fedblend tune`` delivers: the models that it measured, in a run folder."""

import csv
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main, screen
from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check, load
from fedblend.runs.tune import mean_alphas, tune_config, write

CONFIG: dict[str, Any] = {
    "name": "guarded",
    "data": {"file": "table.csv", "target": "y", "client": "site", "test": 0.3},
    "model": {"name": "logistic", "loss": "squared_error"},
    "algorithm": {"name": "apfl", "alpha": 0.5, "learn": "fixed", "rate": 0.05,
                  "steps": 3, "batch_size": 5},
    "run": {"rounds": 3, "seed": 1},
    "measure": {"splits": ["test"]},
}  # fmt: skip
TUNE = ["tune", "apfl.toml", "--folds", "2", "--alphas", "0,0.5"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a table of sites, each with a rule of its own, and a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    rng = np.random.default_rng(0)
    lines = ["site,a,b,y"]
    for site in range(5):
        rule = np.array([1.0, -1.0]) + rng.normal(size=2)
        for a, b in rng.normal(size=(20 + 10 * site, 2)):
            y = rule @ [a, b] + 3 + (1 + site) * rng.standard_t(3)
            lines.append(f"site {site},{a:.6f},{b:.6f},{y:.6f}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "apfl.toml").write_text(toml.write(CONFIG))
    return tmp_path


def read(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def losses(predicted, config):
    """The mean squared error of every client's test rows, found by their targets."""
    targets = np.array([float(row["y"]) for row in read("table.csv")], np.float32)
    test = build(config).federated_data.test
    assert test is not None
    found = []
    for client in range(len(test.counts)):
        rows = np.searchsorted(targets, own := test.rows(client)[1], sorter=np.argsort(
            targets))  # fmt: skip
        rows = np.argsort(targets)[rows]
        np.testing.assert_array_equal(targets[rows], own)
        found.append(np.mean((predicted[rows] - own) ** 2))
    return found


@pytest.mark.slow
def test_predictions_of_the_folder_have_the_loss_that_was_measured(place, capsys):
    assert main([*TUNE, "--out", "tuned.csv"]) == 0
    said = capsys.readouterr()
    assert "choose" not in said.err
    assert max(map(len, said.out.splitlines())) <= 80
    assert "models: fedblend predict tuned TABLE.csv" in said.out
    assert main(["predict", "tuned", "table.csv", "--out", "predicted.csv"]) == 0
    predicted = np.array([float(row["prediction"]) for row in read("predicted.csv")])
    clients = read("tuned/clients.csv")
    measured = [float(row["test_personal_mse"]) for row in clients]
    np.testing.assert_allclose(losses(predicted, load(place / "apfl.toml")), measured,
                               rtol=1e-4)  # fmt: skip
    table = {
        cells[0]: cells
        for cells in map(str.split, said.out.splitlines()[::-1])
        if cells
    }
    assert table["deployed"][1] == f"{np.mean(measured):.4f}"
    for arm, model in (("alone", "local"), ("1", "shared")):
        own = [float(row[f"test_{model}_mse"]) for row in clients]
        assert table[arm][2] == f"{np.mean(own):.4f}"
    choices = read("tuned.csv")
    harm = np.mean([float(row["expected_harm"]) for row in choices])
    told = " ".join(said.out.split())
    assert f"deploy: {harm:.4f}, mean over clients" in told
    assert f"likely between {0.2 * harm:.4f} and {3 * harm:.4f}." in told
    weights = np.array([[float(row[f"weight_of_{arm}"]) for arm in ("alone", "0", "0.5",
                         "1")] for row in choices])  # fmt: skip
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    assert ((weights > 0).sum(axis=1) > 1).any()  # averages, not single arms
    run = fb.load("tuned")
    assert run.summary["runs"][0]["round"] == 3
    assert run.summary["guard"]["expected_harm"] >= 0
    assert all(int(row["bits_up"]) > 0 for row in clients)
    assert main(["export", "tuned", "--client", "site 3", "--out", "out"]) == 0
    assert main(["predict", "out/client-site-3.safetensors", "table.csv", "--out",
                 "again.csv"]) == 0  # fmt: skip
    again = np.array([float(row["prediction"]) for row in read("again.csv")])
    own = np.array([row["site"] == "site 3" for row in read("table.csv")])
    np.testing.assert_allclose(again[own], predicted[own], rtol=1e-5)
    assert main([*TUNE, "--out", "tuned.csv"]) == 2
    assert "tuned.csv: exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_models_that_mix_outputs_without_test_rows(place):
    """FLIX mixes outputs, training alone does not: single arms of one kind of tree."""
    tables = {**CONFIG, "data": {**CONFIG["data"], "test": 0.0}}
    work = {"rate": 0.05, "steps": 3, "batch_size": 5}
    mixing = {"name": "flix_local_steps", "alpha": 0.5, "mix": "outputs"}
    tables["algorithm"] = mixing | work
    config = check(tables, "here")
    found, built, _ = tune_config(config, [0.5], folds=2)
    write(config, built, found, place / "flix.csv")
    run = fb.load(place / "flix")
    inputs = built.federated_data.train.rows(4)[0]
    for client in range(5):
        expected = fb.predict(built.model.apply, found.personal(client), inputs)
        own = fb.predict(run.apply, run.personal(client), inputs)
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("out", "line"),
    [
        ("taken.csv", "taken: exists already; --out names another file"),
        ("tuned", "tuned: is not a .csv file, to which the choices are written"),
        ("no/tuned.csv", "no: is not a folder, where tuned.csv could be written"),
    ],
)
def test_no_place_for_the_models_is_refused(out, line, place, capsys):
    (place / "taken").mkdir()
    assert main([*TUNE, "--out", out]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert line in said.err
    assert said.err.count("\n") == 1


def test_an_alpha_is_the_mean_by_weights_without_training_alone():
    found: Any = SimpleNamespace(
        names=("alone", "0", "0.5", "1"),
        weights=np.array([[0.2, 0, 0.4, 0.4], [0.5, 0, 0, 0.5], [0, 0, 1, 0]]),
        chosen=np.array([2, 0, 2]),
    )
    np.testing.assert_allclose(mean_alphas(found), [0.75, 0, 0.5])
