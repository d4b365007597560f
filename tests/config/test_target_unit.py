# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A regression on a raw table trains in a unit near 1, and speaks that of the table."""

import tomllib
from typing import Any

import jax
import numpy as np
import onnxruntime
import pandas
import pytest

import fedblend as fb
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.data.dataset import task_of
from fedblend.data.readers.read import read
from fedblend.errors import ConfigError
from fedblend.runs.export.export import export_models
from fedblend.runs.personalize import personalize_from
from fedblend.runs.predict import predict_file
from fedblend.runs.run import run_config
from fedblend.simulation.serialize import unpack
from fedblend_federation.contract import contract_of
from fedblend_federation.raw_tables import data_of_nodes

pytestmark = pytest.mark.usefixtures("compiled")

DRAW = np.random.default_rng(0)
ROWS = 120
AGE = DRAW.normal(60, 10, ROWS)
FRAME = pandas.DataFrame(
    {
        "hospital": DRAW.choice(["a", "b", "c"], ROWS),
        "age": AGE,
        "pressure": DRAW.normal(120, 15, ROWS),
        "cost": 90_000 + 1_500 * (AGE - 60) + DRAW.normal(0, 500, ROWS),
    }
)
"""Costs in dollars: without a scale the first step of gradient descent diverges."""


def content(path, **model):
    return {
        "version": 1,
        "name": "costs",
        "data": {
            "file": str(path),
            "target": "cost",
            "client": "hospital",
            "partition": "by_key",
        },
        "model": {"name": "softmax", **model},
        "algorithm": {"name": "fedavg", "rate": 0.3, "steps": 5, "batch_size": 8},
        "run": {"rounds": 12, "every": 12},
        "measure": {"local": False, "metrics": ["loss", "mae", "mse"]},
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "costs.csv"
    FRAME.to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def run(file, tmp_path_factory, compiled):
    out = tmp_path_factory.mktemp("run") / "out"
    run_config(check(content(file), "here"), out)
    return fb.load(out)


def test_center_and_scale_are_near_mean_and_deviation_and_rounded():
    task = task_of(read(FRAME, target="cost", client="hospital"))
    costs = FRAME["cost"].to_numpy()
    assert abs(task.center - costs.mean()) <= task.scale / 8
    assert 0.7 < costs.std() / task.scale < 1.42
    assert np.log2(task.scale) % 1 == 0 and task.center % (task.scale / 4) == 0
    for other in (
        task_of(read(FRAME, target="cost", inputs=["age"], preprocess="none")),
        task_of(read(FRAME.drop(columns="cost"), target="hospital")),
    ):
        assert (other.center, other.scale) == (0, 1)
    same = task_of(read(FRAME.assign(cost=7.5), target="cost"))
    assert (same.center, same.scale) == (7.5, 1)


def test_training_sees_scaled_targets(file):
    """So theory's constants of least squares hold, which are those of the inputs."""
    built = build(check(content(file), "here"))
    inputs, costs = built.federated_data.train.rows(0)
    params = built.model.init(jax.random.key(1))
    task = built.task
    np.testing.assert_allclose(
        built.model.apply(params, inputs), np.full((len(inputs), 1), task.center)
    )
    by_hand = 0.5 * np.mean(((costs - task.center) / task.scale) ** 2)
    assert built.loss(params, (inputs, costs)).mean() == pytest.approx(by_hand, 1e-5)
    slope = jax.grad(lambda params: built.loss(params, (inputs, costs)).mean())(params)
    by_hand = inputs.T @ (task.center - costs) / task.scale / len(costs)
    weights = max(jax.tree.leaves(slope), key=lambda leaf: leaf.size)
    np.testing.assert_allclose(weights.ravel(), by_hand, rtol=1e-4, atol=1e-5)


def test_measures_and_predictions_are_in_the_unit_of_the_table(run):
    found = run.predict(FRAME.drop(columns="cost"), shared=True)
    error = np.abs(found - FRAME["cost"]).mean()
    assert error < 1500  # of a noise of 500, and of a deviation of 15,000
    told = run.frame()
    last = told[(told["round"] == 12) & (told["split"] == "test")]
    by_name = last[last["model"] == "personal"].set_index("metric")["mean"]
    assert by_name["mae"] < 1500
    assert by_name["mse"] == pytest.approx(2 * by_name["loss"], rel=1e-5)


@pytest.mark.slow
def test_new_clients_are_measured_in_the_unit_of_the_table(run, file):
    (line, *_) = personalize_from(run.folder.path, file).gains()
    assert line["personal_mse"] < 0.5 * 1500**2


def test_exported_files_predict_in_the_unit_of_the_table(run, tmp_path):
    rows = FRAME.drop(columns="cost")
    wanted = run.predict(rows, shared=True)
    for to in ("safetensors", "onnx"):
        (path,) = export_models(run, tmp_path, to=to, shared=True)
        np.testing.assert_allclose(predict_file(path, rows).labels, wanted, rtol=1e-5)
    session = onnxruntime.InferenceSession(tmp_path / "shared.onnx")
    given = {name: rows[[name]].to_numpy(np.float64) for name in ("age", "pressure")}
    alone: Any = session.run(["prediction"], given)[0]
    np.testing.assert_allclose(alone[:, 0], wanted, rtol=1e-5)
    (path,) = export_models(run, tmp_path, to="torch", shared=True)
    _, about = unpack(path.read_bytes())
    assert float(about["center"]) == run.task.center
    assert float(about["scale"]) == run.task.scale


def test_a_federation_states_the_unit(file, tmp_path):
    dataset = read(file, target="cost", client="hospital")
    tables = content(file)
    text = data_of_nodes(dataset, 3)
    tables["data"] = tomllib.loads(text)["data"]
    contract = contract_of(check(tables, "here"))
    assert contract.task == task_of(dataset)
    tables["data"] |= {"kind": "binary"}
    with pytest.raises(ConfigError, match=r'scale: goes with kind = "regression"'):
        check(tables, "here")
