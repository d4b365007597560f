# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The network for tables, and the ranks that it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.data.dataset import DataError
from fedblend.data.preprocess.preprocessing import (
    BINS,
    LEVELS,
    Preprocessing,
    client_statistics,
    finish,
    fit,
)
from fedblend.data.preprocess.schema import schema_of
from fedblend.errors import InputError
from fedblend.models.tabular import tabular
from fedblend.runs.export.export import export_models

RANKS = 2


def test_the_model_is_its_transcription_in_numpy():
    """Bins are clip((x - a) / (b - a), 0, 1), written with their edges here."""
    draw = np.random.default_rng(0)
    edges = np.sort(draw.normal(size=(RANKS, BINS + 1)), axis=1)
    numbers = draw.normal(size=(50, RANKS))
    plain = np.hstack([numbers, draw.integers(0, 2, (50, 1))])
    ranks = [
        np.interp(x, e, np.arange(BINS + 1))
        for x, e in zip(numbers.T, edges, strict=True)
    ]
    model = tabular(5, 3, ranks=RANKS, hidden=(7, 6))
    params = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(draw.normal(size=leaf.shape), jnp.float32),
        model.init(jax.random.key(0)),
    )
    found = model.apply(params, np.column_stack([plain, *ranks]).astype(np.float32))
    params = jax.tree.map(np.asarray, params)

    bins = np.hstack(
        [
            np.clip((numbers[:, [j]] - edges[j, :-1]) / np.diff(edges[j]), 0, 1)
            for j in range(RANKS)
        ]
    )
    here = np.hstack([plain, bins])
    for layer in params.hidden:
        here = np.maximum(here @ np.asarray(layer.weight).T + layer.bias, 0)
    weight = params.last.weight
    expected = here @ weight[:, :6].T + plain @ weight[:, 6:].T + params.last.bias
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.fixture
def columns():
    draw = np.random.default_rng(1)
    return {
        "skewed": draw.lognormal(size=200),
        "few": draw.integers(0, 3, 200).astype(float),
        "word": np.array(draw.choice(["a", "b"], 200), object),
        "gaps": np.where(draw.random(200) < 0.3, np.nan, draw.normal(size=200)),
    }


def ranked(columns):
    return schema_of(columns)._replace(ranks=True)


def test_edges_of_equal_clients_are_the_quantiles_of_numpy(columns):
    schema = ranked(columns)
    fitted = fit(schema, [schema.encode(columns)] * 3).fitted
    for name, place in zip(("skewed", "few", "gaps"), schema.ranked, strict=True):
        expected = np.unique(np.nanquantile(columns[name], LEVELS, method="lower"))
        np.testing.assert_allclose(fitted[place].edges, expected, rtol=1e-12)


def test_edges_of_clients_far_apart_divide_the_rows_of_both():
    draw = np.random.default_rng(2)
    low, high = draw.normal(size=300), 100 + draw.normal(size=900)
    schema = ranked({"x": np.concatenate([low, high])})
    clients = [schema.encode({"x": part}) for part in (low, high)]
    made = fit(schema, clients)
    ranks = np.concatenate([made.transform_encoded(one)[:, -1] for one in clients])
    counts = np.histogram(ranks, np.arange(BINS + 1))[0]
    assert counts.min() > 25  # of 75 where rows were in one place


def test_ranks_are_inputs_and_survive_a_file(columns):
    schema = ranked(columns)
    made = finish(schema, [client_statistics(schema, schema.encode(columns))])
    assert made.features[-3:] == ("skewed rank", "few rank", "gaps rank")
    again = Preprocessing.parse(made.dump())
    assert again == made
    inputs = again.transform(columns)
    assert inputs.shape == (200, len(made.features))
    assert set(np.unique(inputs[:, -2])) == {0.0, 1.0, 2.0}
    assert inputs[:, -3:].min() >= 0 and inputs[:, -3:].max() <= BINS
    without = made.dump().replace('"edges"', '"other"')
    with pytest.raises(DataError):
        Preprocessing.parse(without)


def test_a_run_has_ranks_and_predicts_with_them(tmp_path):
    draw = np.random.default_rng(3)
    lines = ["site,x,y"]
    for row in range(120):
        x = draw.normal()
        lines.append(f"{row % 3},{x:.4f},{'high' if abs(x) > 0.7 else 'low'}")
    table = tmp_path / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    config = f"""
version = 1
name = "t"
[data]
file = "{table}"
client = "site"
target = "y"
partition = "by_key"
test = 0.2
[model]
name = "tabular"
hidden = [16]
[algorithm]
name = "fedavg"
rate = 0.3
steps = 5
batch_size = "all"
[run]
rounds = 40
[measure]
local = false
"""
    from fedblend.config.config import loads
    from fedblend.runs.run import run_config

    run_config(loads(config, "t"), tmp_path / "run")
    run = fb.load(tmp_path / "run")
    assert run.task.ranks == 1 and run.task.shape == (2,)
    ends = run.predict({"site": [0, 0, 0], "x": [-2.0, 0.0, 2.0]}, client="0")
    assert list(ends) == ["high", "low", "high"]  # no line in x says so
    with pytest.raises(InputError, match="the ranks that preprocessing makes"):
        export_models(run, tmp_path, to="onnx", clients=["0"])
