# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The cross-silo board: its files, constants, page, and FLamby's training."""

import importlib.util
import itertools
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedblend.cli.data import HEART
from fedblend.data.dataset import DataError, MissingDataError
from fedblend.runs.auto.linear import PooledRows
from fedblend.runs.auto.tuning import Split
from fedblend_reproductions.board.__main__ import main
from fedblend_reproductions.silos import command, comparison, page, tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def study():
    place = ROOT / "reproductions" / "studies" / "flamby_heart.py"
    spec = importlib.util.spec_from_file_location("flamby_heart", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(study):
    draws = np.random.default_rng(0)
    inputs = np.hstack([np.ones((30, 1)), draws.normal(size=(30, 3))])
    return study.Rows(inputs, draws.random(30) < 0.4)


def jax_slope(rows):
    signs = jnp.where(jnp.asarray(rows.ill), 1.0, -1.0)

    def loss(model):
        return jnp.mean(jnp.logaddexp(0, -signs * (jnp.asarray(rows.inputs) @ model)))

    return jax.grad(loss)


def test_slope_is_that_of_the_mean_log_loss(study, rows):
    model = np.array([0.3, -1.0, 0.5, 2.0])
    there = jax_slope(rows)(jnp.asarray(model))
    np.testing.assert_allclose(study.slope(model, rows), there, atol=1e-6)


def test_adam_is_that_of_optax(study, rows):
    here, slope, adam = jnp.zeros(4), jax_slope(rows), optax.adam(1e-3)
    state = adam.init(here)
    for _ in range(50):
        move, state = adam.update(slope(here), state)
        here = jnp.asarray(optax.apply_updates(here, move))
    ours = study.descend_adam(np.zeros(4), itertools.repeat(rows), 50)
    np.testing.assert_allclose(ours, here, atol=1e-5)


def test_batches_take_every_row_once_an_epoch(study):
    rows = study.Rows(np.arange(10.0)[:, None], np.zeros(10, bool))
    feed = study.batches(rows, np.random.default_rng(0))
    for _ in range(2):
        taken = [next(feed).inputs[:, 0] for _ in range(3)]
        assert [len(part) for part in taken] == [4, 4, 2]
        assert sorted(np.concatenate(taken)) == list(range(10))


def test_rounds_of_one_step_are_gradient_descent_on_all_rows(study, rows):
    parts = [
        study.Rows(rows.inputs[:20], rows.ill[:20]),
        study.Rows(rows.inputs[20:], rows.ill[20:]),
    ]
    feeds, weights = [itertools.repeat(part) for part in parts], np.array([2, 1]) / 3
    here = np.zeros(4)
    for _ in range(3):
        here = here - 0.5 * study.slope(here, rows)
    found = study.federate(np.zeros(4), feeds, weights, 0.5, rounds=3, steps=1)
    np.testing.assert_allclose(found, here, atol=1e-12)
    # Many local steps drift, and control variates remove that.
    ends = {
        correct: study.federate(
            np.zeros(4), feeds, weights, 0.5, rounds=400, steps=10, correct=correct
        )
        for correct in (False, True)
    }
    assert np.abs(study.slope(ends[True], rows)).max() < 1e-8
    assert np.abs(study.slope(ends[False], rows)).max() > 1e-3


def test_the_split_is_that_of_flamby(study):
    hospitals = study.read_hospitals()
    # The numbers of rows that FLamby publishes.
    counts = [(len(train.ill), len(test.ill)) for train, test in hospitals]
    assert counts == [(199, 104), (172, 89), (30, 16), (85, 45)]
    assert hospitals[0][0].inputs.shape == (199, 13)
    assert np.mean(study.majority(hospitals)) == pytest.approx(0.721, abs=5e-4)
    for train, _ in study.scale_per_hospital(hospitals):
        np.testing.assert_allclose(train.inputs[:, 1:].mean(axis=0), 0, atol=1e-9)


def test_constants():
    task: Any = types.SimpleNamespace(kind="regression", scale=2.0)
    train = PooledRows(np.ones((3, 1)), np.array([0.0, 2.0, 4.0]), np.array([1, 2]))
    held = PooledRows(np.ones((2, 1)), np.array([1.0, 5.0]), np.array([1, 1]))
    found = comparison.score_constants(task, [Split(train, held)])
    assert found == {"constant": 4 * (1 + 9) / 2, "own_constant": 4 * (1 + 4) / 2}
    task.kind = "binary"
    loss = comparison.constant_loss(task, np.array([1, 1, 1]), np.array([1, 0]))
    assert loss == pytest.approx(-(np.log(0.8) + np.log(0.2)) / 2)


def test_an_entry_of_the_table_that_is_shipped(tmp_path):
    known = tables.TABLES["heart"]
    entry = comparison.compare(known, HEART, 0.01, lambda line: None)
    assert entry["clients"] == 4 and entry["rows"] == 920
    # The rule of auto has its own constants.
    constant = min(entry["constants"].values())
    assert entry["findings"]["constant"] == pytest.approx(constant, rel=1e-5)
    assert entry["constants"]["own_constant"] < entry["constants"]["constant"]
    command.store(tmp_path, "heart", entry)
    assert main(["silos", "--check", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "silos.md").read_text()
    (tmp_path / "silos.md").write_text(text.replace("| heart |", "| hart |"))
    assert main(["silos", "--check", "--out", str(tmp_path)]) == 2
    assert main(["silos", "--page", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "silos.md").read_text() == text


def test_files_are_found_and_checked(tmp_path, monkeypatch, capsys):
    assert tables.locate("heart") == HEART
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"taxi\.csv\.gz is not in .*modeldata"):
        tables.locate("taxi")
    (tmp_path / "taxi.csv").write_text("tip,company\nyes,Blue\n")
    with pytest.raises(DataError, match="sha256 of its content must be 64e6123"):
        tables.locate("taxi", tmp_path)
    out = ["--out", str(tmp_path)]
    assert main(["silos", "--only", "taxi", *out]) == 0
    assert "left out: taxi" in capsys.readouterr().err
    assert main(["silos", "--only", "nothing", *out]) == 2
    assert main(["silos", "--check", *out]) == 2


def test_crimes_are_logarithms_without_what_counts_them(tmp_path):
    target = tables.TABLES["communities"].target
    path = tmp_path / "raw.csv"
    path.write_text(f"state,fold,a,b,murders,{target}\nNY,,1,,3,0\nNY,,2,,4,1\n")
    place = tables.prepare("communities", path, tmp_path)
    assert place.read_text().splitlines() == [f"state,fold,a,{target}", "NY,,2,0.0"]


def test_the_page_is_that_of_its_numbers():
    assert command.check(RESULTS) == len(command.read(RESULTS))
    for name, entry in command.read(RESULTS).items():
        assert not entry["dirty"], name
        assert entry["versions"].keys() >= {"fedblend", "jax", "scikit-learn"}


def test_a_page_has_the_network_of_the_validation_rows():
    entry = dict(command.read(RESULTS)["heart"])
    entry["methods"] = {
        "network": {"test": 0.111, "validation": 0.2},
        "network_level": {"test": 0.333, "validation": 0.1},
    }
    (line,) = [
        line for line in page.page({"heart": entry}).splitlines() if " 0.333 " in line
    ]
    assert line.split(" | ")[8] == "0.333" and "0.111" not in line
