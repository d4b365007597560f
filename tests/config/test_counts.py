# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Counts are learned by Poisson regression, and predicted as their mean."""

import tomllib

import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import mean_poisson_deviance

import fedblend as fb
from fedblend.config.config import check
from fedblend.data.dataset import DataError, task_of
from fedblend.data.readers.read import read, read_new_rows
from fedblend.data.readers.targets import look_like_counts
from fedblend.runs.export.export import export_models
from fedblend.runs.predict import predict_file
from fedblend.runs.run import run_config
from fedblend.stats.constant_baseline import chance
from fedblend_federation.contract import contract_of
from fedblend_federation.raw_tables import data_of_nodes

DRAW = np.random.default_rng(0)
ROWS = 240
DOSE = DRAW.normal(size=ROWS)
FRAME = pandas.DataFrame(
    {
        "hospital": np.repeat(["a", "b", "c"], ROWS // 3),
        "dose": DOSE,
        "visits": DRAW.poisson(np.exp(4 + DOSE / 2)),
    }
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, compiled):
    folder = tmp_path_factory.mktemp("counts")
    FRAME.to_csv(folder / "visits.csv", index=False)
    content = {
        "version": 1,
        "name": "visits",
        "data": {"file": str(folder / "visits.csv"), "kind": "counts"},
        "model": {"name": "softmax"},
        "algorithm": {"name": "hierarchical", "rate": 1.0, "batch_size": "all"},
        "run": {"rounds": 8, "every": 8},
        "measure": {"local": False, "splits": ["train"]},
    }
    content["data"] |= {"target": "visits", "client": "hospital", "test": 0.0}
    content["algorithm"] |= {"steps": 1, "level": 0.0}
    run_config(check(content, "here"), folder / "out")
    return fb.load(folder / "out")


def test_a_run_is_a_poisson_regression(run):
    straight = PoissonRegressor(alpha=0, tol=1e-9).fit(FRAME[["dose"]], FRAME["visits"])
    expected = straight.predict(FRAME[["dose"]])
    found = run.predict(FRAME[["dose"]], client="b")
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    measured = run.summary["runs"][0]["measures"]["train"]["shared"]
    deviance = mean_poisson_deviance(FRAME["visits"], expected)
    assert measured["deviance"]["mean"] == pytest.approx(deviance, rel=1e-3)
    assert measured["loss"]["mean"] == pytest.approx(deviance / 2, rel=1e-3)


@pytest.mark.parametrize("to", ["safetensors", "onnx"])
def test_an_exported_model_predicts_the_same(run, to, tmp_path):
    rows = FRAME[["dose"]]
    (path,) = export_models(run, tmp_path, to=to, shared=True)
    found = predict_file(path, rows).labels
    np.testing.assert_allclose(np.ravel(found), run.predict(rows), rtol=1e-4)


def test_the_loss_of_a_constant_is_that_of_the_mean():
    dataset = read(FRAME, target="visits", client="hospital", kind="counts")
    partition = fb.data.partition.by_key(dataset.keys)
    data = fb.data.federate_dataset(dataset, partition)
    mean = np.full(ROWS, FRAME["visits"].mean())
    half = mean_poisson_deviance(FRAME["visits"], mean) / 2
    assert chance("poisson", data) == pytest.approx(half, rel=1e-5)


def test_counts_of_zero_have_a_loss():
    loss = fb.losses.poisson(lambda _, scores: scores)
    rows = jnp.array([[0.0], [1.0]]), jnp.array([0.0, 2.0])
    expected = [1.0, np.e - 2 + 2 * np.log(2) - 2]
    np.testing.assert_allclose(loss((), rows), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (DRAW.poisson(1.0, 300), True),
        (DRAW.negative_binomial(1, 0.3, 300), True),
        (DRAW.poisson(60.0, 300), False),
        (DRAW.integers(0, 11, 300), False),  # grades
        (DRAW.integers(1, 71, 300), False),
        (np.round(1000 * DRAW.exponential(size=300)), False),
        (DRAW.poisson(1.0, 300) + 0.5, False),
        (DRAW.poisson(1.0, 300) - 1, False),
    ],
)
def test_what_looks_like_counts(numbers, expected):
    assert look_like_counts(numbers) == expected


def test_nodes_are_told_the_unit_and_refuse_other_numbers():
    dataset = read(FRAME, target="visits", client="hospital", kind="counts")
    content = {
        "version": 1,
        "name": "visits",
        "data": tomllib.loads(data_of_nodes(dataset, 3))["data"],
        "algorithm": {"name": "fedavg"},
        "run": {"rounds": 1},
    }
    task = contract_of(check(content, "here")).task
    assert task == task_of(dataset) and task.center == 4.0
    negative = FRAME.assign(visits=-FRAME["visits"] - 1)
    with pytest.raises(DataError, match="is no count; counts are whole numbers from 0"):
        read_new_rows(negative, task, target="visits", preprocessing=dataset.schema)
    none = FRAME.assign(visits=0)
    rows = read_new_rows(none, task, target="visits", preprocessing=dataset.schema).rows
    assert not rows[1].any()


@pytest.mark.parametrize(
    ("visits", "options", "line"),
    [
        (FRAME["visits"] / 2, {}, "in row .* is no count"),
        (-FRAME["visits"], {}, "whole numbers from 0 on"),
        (0 * FRAME["visits"], {}, "all 240 counts are 0"),
        (FRAME["visits"].astype(str) + "x", {}, "counts needs numeric targets"),
        (FRAME["visits"], {"log_shift": 0.0}, "log_shift: is for numbers .*not counts"),
    ],
)
def test_what_are_no_counts_is_said(visits, options, line):
    with pytest.raises(DataError, match=line):
        frame = FRAME.assign(visits=visits)
        read(frame, target="visits", client="hospital", kind="counts", **options)
