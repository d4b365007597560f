# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fb.auto`` with little time, and on tables that are large."""

import json

import numpy as np
import pandas as pd
import pytest

import fedblend as fb
from fedblend.config.build import build
from fedblend.config.tables.data import load_dataset
from fedblend.data.readers.tables import read_table
from fedblend.runs.auto import comparison, contest
from fedblend.runs.auto.candidates import BY_NAME, Request, configuration
from fedblend.runs.auto.letters import expand_splits
from fedblend.runs.auto.tuning import LateSplit, measure, predict


def columns(numbers=False):
    draw = np.random.default_rng(0)
    site, x = np.repeat(np.arange(12), 30), draw.normal(size=(360, 2)).round(4)
    y = (x[:, 0] + draw.normal(size=360)).round(4)
    table = {"site": [f"s{one}" for one in site], "x": x[:, 0], "noise": x[:, 1]}
    return table | {"y": y if numbers else np.where(draw.random(360) < 0.5, "a", "b")}


def test_without_time_the_table_is_not_blamed_and_what_is_left_out_is_said(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(comparison, "SPLITS", 3)
    monkeypatch.setattr(comparison, "GRACE", 0.0)
    out = tmp_path / "out"
    found = fb.auto(
        columns(), client="site", target="y", minutes=1e-6, out=out, quiet=True
    )
    assert "too early to tell" in found.verdict[0]
    assert "this table" not in found.verdict[0]
    state = json.loads((out / "auto.json").read_text())
    left_out = state["warnings"][-1]
    assert left_out.startswith("left out for lack of time: ")
    assert "worth in rows" in left_out and "--minutes" in left_out
    assert "worth" not in state and not (out / "why.csv").exists()
    # No run is there, and yet the page and a configuration.
    assert {*(path.name for path in out.iterdir())} >= {"config.toml", "report.html"}
    assert not (out / "runs").exists()


@pytest.fixture
def built(tmp_path):
    def make(numbers):
        path = tmp_path / f"{numbers}.csv"
        pd.DataFrame(columns(numbers)).to_csv(path, index=False)
        request, seeds = Request(path, "site", "y"), [0, 1]
        setting = BY_NAME["fedavg"].first
        both = (
            build(configuration(request, "fedavg", setting, seeds=seeds, validation=of))
            for of in (0.2, 0.0)
        )
        return request, *both

    return make


@pytest.mark.parametrize("numbers", [False, True])
def test_a_large_table_has_the_scores_of_its_rows(numbers, built, monkeypatch):
    request, chosen, tested = built(numbers)
    setting = {"hierarchical": {"setting": {"slopes": 0.02, "level": 0.3}}}
    scores = []
    for late in (contest.LATE, 0):
        monkeypatch.setattr(contest, "LATE", late)
        one = contest.Contest.read(
            request, chosen, tested, json.loads(json.dumps(setting))
        )
        assert one.is_large == (late == 0)
        one.evaluate(BY_NAME["hierarchical"], lambda: 1.0)
        scores.append(one.scores["hierarchical"])
    for rows, late in zip(*scores, strict=True):
        np.testing.assert_array_equal(rows, late)


def test_letters_of_a_large_table_have_the_errors_of_its_rows(built):
    _, chosen, _ = built(True)
    task, setting = chosen.task, {"slopes": 0.02, "level": 0.3, "ridge": 0.01}
    splits = [LateSplit(one, "validation", task) for one in chosen.federations]
    rows, letters = (
        measure(task, of, predict(task, "hierarchical", of, setting))["mse"]
        for of in (splits, expand_splits(task, splits))
    )
    np.testing.assert_allclose(letters, rows, rtol=1e-9)


def test_a_file_is_read_once_until_it_changes(tmp_path):
    path = tmp_path / "table.csv"
    request = Request(path, "site", "y")
    data = configuration(request, "fedavg", {}, seeds=[0]).data
    pd.DataFrame(columns()).to_csv(path, index=False)
    first = load_dataset(data)
    assert load_dataset(data) is first
    pd.DataFrame(columns()).head(200).to_csv(path, index=False)
    assert len(load_dataset(data).rows[0]) == 200


def test_equal_texts_of_a_file_are_one_object(tmp_path):
    path = tmp_path / "table.csv"
    pd.DataFrame({"a": ["low", "high", None] * 20}).to_csv(path, index=False)
    column = read_table(path).columns["a"]
    assert column.tolist() == pd.read_csv(path)["a"].fillna("").tolist()
    assert len({id(one) for one in column}) == 3
