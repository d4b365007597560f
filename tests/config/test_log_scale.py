# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Skewed numbers are learned as logarithms, and predicted in the unit of the table."""

import tomllib
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.linear_model import LinearRegression

import fedblend as fb
from fedblend.config.config import check
from fedblend.data.dataset import DataError, task_of
from fedblend.data.readers.read import read, read_new_rows
from fedblend.data.readers.targets import log_shift_of
from fedblend.errors import InputError, UserError
from fedblend.runs.auto import candidates, comparison
from fedblend.runs.auto.candidates import Request
from fedblend.runs.auto.comparison import AutoComparison, Screen
from fedblend.runs.export.export import export_models
from fedblend.runs.predict import predict_file
from fedblend.runs.run import run_config
from fedblend_federation.contract import contract_of
from fedblend_federation.raw_tables import data_of_nodes

DRAW = np.random.default_rng(0)
ROWS = 240
DOSE = DRAW.normal(size=ROWS)
FRAME = pandas.DataFrame(
    {
        "hospital": np.repeat(["a", "b", "c"], ROWS // 3),
        "dose": DOSE,
        "cost": np.round(np.exp(3 + DOSE + DRAW.normal(0, 0.5, ROWS))),
    }
)
"""Costs of whole dollars, some of which are 0."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "costs.csv"
    FRAME.to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    ("numbers", "shift"),
    [
        (np.exp(DRAW.normal(size=500)), 0.0),
        (1e-6 * np.exp(DRAW.normal(size=500)), 0.0),
        (np.floor(np.exp(3 + 2 * DRAW.normal(size=500))), 1.0),
        (np.exp(0.3 * DRAW.normal(size=500)), None),  # within an order of magnitude
        (DRAW.random(500), None),
        (np.abs(DRAW.normal(size=500)), None),
        (DRAW.normal(size=500) ** 3, None),
        (1 - np.exp(-DRAW.normal(size=500)), None),
        (np.full(9, 3.0), None),
    ],
)
def test_numbers_over_orders_of_magnitude_go_on_the_log_scale(numbers, shift):
    assert log_shift_of(numbers) == shift


def test_a_run_is_least_squares_of_logarithms(file, tmp_path, compiled):
    content = {
        "version": 1,
        "name": "costs",
        "data": {"file": str(file), "target": "cost", "client": "hospital"},
        "model": {"name": "softmax"},
        "algorithm": {"name": "hierarchical", "rate": 1.0, "batch_size": "all"},
        "run": {"rounds": 2, "every": 2},
        "measure": {"local": False, "metrics": ["mse"]},
    }
    content["data"] |= {"partition": "by_key", "test": 0.0, "log_shift": 1.0}
    content["algorithm"] |= {"steps": 1, "level": 0.0}
    run_config(check(content, "here"), tmp_path / "out")
    run = fb.load(tmp_path / "out")
    straight = LinearRegression().fit(FRAME[["dose"]], np.log1p(FRAME["cost"]))
    wanted = np.expm1(straight.predict(FRAME[["dose"]]))
    rows = FRAME.drop(columns="cost")
    np.testing.assert_allclose(run.predict(rows), wanted, rtol=1e-4)
    for to in ("safetensors", "onnx"):
        (path,) = export_models(run, tmp_path, to=to, shared=True)
        found = predict_file(path, rows).labels
        np.testing.assert_allclose(np.ravel(found), wanted, rtol=1e-4)


def test_new_rows_are_of_the_same_scale(file):
    names: Any = {"target": "cost", "client": "hospital"}
    dataset = read(file, **names, log_shift=1.0)
    np.testing.assert_allclose(dataset.rows[1], np.log1p(FRAME["cost"]), rtol=1e-6)
    new = read_new_rows(FRAME, task_of(dataset), **names, preprocessing=dataset.schema)
    np.testing.assert_array_equal(new.rows[1], dataset.rows[1])


def test_what_has_no_logarithm_is_refused():
    refused = pytest.raises(DataError, match=r"target 0 in row .* has no logarithm")
    with refused:
        read(FRAME, target="cost", log_shift=0.0)
    with pytest.raises(DataError, match=r"is for numbers \(regression\), not classes"):
        read(FRAME, target="hospital", log_shift=0.0)


def test_a_federation_states_the_scale(file):
    dataset = read(file, target="cost", client="hospital", log_shift=1.0)
    content = {
        "version": 1,
        "name": "costs",
        "data": tomllib.loads(data_of_nodes(dataset, 3))["data"],
        "algorithm": {"name": "fedavg"},
        "run": {"rounds": 1},
    }
    assert contract_of(check(content, "here")).task == task_of(dataset)


def seen(file, out, **options):
    """What a comparison says of the table before it compares."""
    lines = []
    request = Request(file, "hospital", "cost", **options)
    judged = AutoComparison(request, out, 1.0, Screen(lines.append))
    judged.judge()
    return judged.state, "\n".join(lines)


def test_auto_chooses_the_scale_and_says_so(file, tmp_path, monkeypatch):
    linear = [one for one in candidates.CANDIDATES if one.model == "linear"]
    monkeypatch.setattr(comparison, "CANDIDATES", linear)
    monkeypatch.setattr(comparison, "SPLITS", 3)
    state, said = seen(file, tmp_path / "auto")
    assert "predict log(it + 1)" in said and "--scale linear" in said
    assert state["criterion"] == "squared error of the logarithm"
    assert 0.15 < state["methods"]["fedavg"]["test"] < 0.5
    state, said = seen(file, tmp_path / "linear", scale="linear")
    assert "log(" not in said and state["methods"]["fedavg"]["test"] > 10


def test_auto_refuses_a_scale_in_one_line(file, tmp_path):
    with pytest.raises(InputError, match=r"--scale log: hospital is no single number"):
        request = Request(file, "dose", "hospital", scale="log")
        AutoComparison(request, tmp_path / "a", 1.0, Screen()).judge()
    with pytest.raises(UserError, match=r'scale: .*"log" or "linear"'):
        fb.auto(file, client="hospital", target="cost", scale="cubic")
