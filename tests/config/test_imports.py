# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models and algorithms of one's own, by import path in a configuration."""

import copy
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend import registry
from fedblend.config.build import build
from fedblend.config.config import check, dump, load, loads
from fedblend.config.toml import write
from fedblend.errors import ConfigError, RunError
from fedblend.runs import run_folder
from fedblend.runs.export.portable import read_metadata
from fedblend.runs.paired import data_keys
from fedblend.simulation.simulate import set_up
from tiny_config import TINY

TASK = {"kind": "classes", "outputs": 10, "shape": [4], "labels": [], "columns": []}
PARTS = """
import equinox
import jax
import jax.numpy as jnp
import torch
from flax import nnx

from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import Positive
from fedblend.local import Work
from fedblend.models import softmax as named
from fedblend.registry import algorithm

nn = torch.nn


def network(shape, outputs, *, width=4):
    return nn.Sequential(
        nn.Conv2d(shape[-1], width, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(36 * width, outputs),
    )


def dropping(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, outputs))


def model(shape, outputs, *, dtype):
    assert dtype == jnp.float32
    return named(64, outputs)


def pair(shape, outputs):
    start = jnp.zeros((64, outputs))
    return lambda key: start, lambda params, rows: rows.reshape(-1, 64) @ params


class Flat(nnx.Module):
    def __init__(self, outputs):
        self.layer = nnx.Linear(64, outputs, rngs=nnx.Rngs(0))

    def __call__(self, rows):
        return self.layer(rows.reshape(-1, 64))


def flax(shape, outputs):
    return Flat(outputs)


class Row(equinox.Module):
    layer: equinox.nn.Linear

    def __call__(self, row):
        return self.layer(row.reshape(-1))


def haze(shape, outputs):
    return Row(equinox.nn.Linear(64, outputs, key=jax.random.key(0)))


def nothing(shape, outputs):
    pass


def failing(shape, outputs):
    return 1 / 0


VALUE = 3


def plain(loss, work, *, factor: float = 1.0):
    assert factor > 0, "factor is not above 0"
    return fedavg(loss, work._replace(optimizer=work.optimizer * factor))


@algorithm(sends=("update",))
def registered(loss, work: Work, *, factor: Positive = 2.0):
    return plain(loss, work, factor=factor)
"""


@pytest.fixture(scope="module", autouse=True)
def parts(tmp_path_factory):
    """The folder of a configuration, with a module beside it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_parts.py").write_text(PARTS)
    (folder / "own_broken.py").write_text(
        "\nimport own_parts\nraise RuntimeError('no')"
    )
    (folder / "own_needy.py").write_text("import a_package_that_is_missing")
    (folder / "json.py").write_text("")
    yield folder
    registry.ALGORITHMS._found.pop("registered", None)  # other tests read the registry


def configured(parts: Path, **tables):
    content = copy.deepcopy(TINY)
    for name, table in tables.items():
        content[name] |= table
    return check(content, "own.toml", parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["network", "model", "pair", "flax", "haze"])
def test_all_that_a_function_may_return_is_a_model(parts, name):
    built = build(configured(parts, model={"name": f"own_parts:{name}"}))
    rows = np.zeros((3, *built.task.shape), np.float32)
    params = built.model.init(jax.random.key(0))
    assert built.model.apply(params, rows).shape == (3, 10)


@pytest.mark.slow
def test_options_reach_the_function_and_seeds_differ(parts):
    own = {"name": "own_parts:network", "width": 2}
    model = build(configured(parts, model=own)).model
    one, two = (model.init(jax.random.key(seed)) for seed in (0, 1))
    assert one["0.weight"].shape == (2, 1, 3, 3)
    assert not np.allclose(one["0.weight"], two["0.weight"])


@pytest.mark.slow
def test_a_file_with_its_own_model_runs_and_reads_back(parts):
    content = copy.deepcopy(TINY)
    content["model"] = {"name": "own_parts:dropping", "dropout": "off"}
    content["algorithm"] |= {"name": "own_parts:plain", "factor": 0.5}
    path = parts / "config.toml"
    path.write_text(write(content))
    config = load(path)
    again = loads(dump(config), "a run's folder")
    assert dump(again) == dump(config)
    run = set_up(build(again).spec).complete()
    expected = copy.deepcopy(content)
    expected["algorithm"] = TINY["algorithm"] | {"rate": 0.05}
    other = set_up(build(check(expected, "x", parts)).spec).complete()
    jax.tree.map(np.testing.assert_array_equal, run.shared, other.shared)


def test_an_algorithm_that_registers_itself_has_its_rules(parts):
    own = {"name": "own_parts:registered"}
    assert configured(parts, algorithm=own).algorithm.model_dump()["factor"] == 2.0
    with pytest.raises(ConfigError, match=r"algorithm.factor: -1.0 is not above 0"):
        configured(parts, algorithm={**own, "factor": -1.0})


MODELS = {
    "own_parts:nothing": r'": returned nothing, which is not a Model, a pair \(init',
    "own_parts:failing": r'": ZeroDivisionError: .* \(.*/own_parts.py:66\)$',
    "own_parts:missing": '": own_parts has no missing$',
    "own_parts:VALUE": '": own_parts has no function, but a value, VALUE$',
    "own_broken:model": r'": RuntimeError: no \(.*/own_broken.py:3\)$',
    "own_needy:model": r'": ModuleNotFoundError: .* \(.*/own_needy.py:1\)$',
    "own_absent:model": '": there is no module own_absent; it is looked for among',
    "json:loads": '": json is also the name of a module in .*; rename .*json.py$',
    "own parts:model": '" is not "package.module:function"$',
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_wrong_with_a_model_is_one_line(parts, name):
    with pytest.raises(
        ConfigError, match=f'^model.name: "{name}{MODELS[name]}'
    ) as told:
        build(configured(parts, model={"name": name}))
    assert "\n" not in str(told.value)


ALGORITHMS = {
    "own_parts:missing": ({}, "name: .*own_parts has no missing$"),
    "own_parts:nothing": ({}, "name: .*TypeError: nothing.. missing 2 required"),
    "own_parts:plain": (
        {"factor": -1.0},
        r"name: .*AssertionError: factor is not .*:73",
    ),
    "own_parts:plain ": (
        {},
        'name: "own_parts:plain " is not "package.module:function',
    ),
    "own_absent:plain": ({}, "name: .*there is no module own_absent"),
    "builtins:dict": ({}, "name: .*no signature found"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_wrong_with_an_algorithm_is_one_line(parts, name):
    options, message = ALGORITHMS[name]
    with pytest.raises(ConfigError, match=f"^own.toml: algorithm.{message}") as told:
        configured(parts, algorithm={"name": name, **options})
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("key", ["facto", "factor", "rate"])
def test_keys_of_an_imported_algorithm_are_checked(parts, key):
    value, message = {
        "facto": (1.0, "facto: unknown key; did you mean 'factor'"),
        "factor": ("a", 'factor: "a" is not a number'),
        "rate": (-1.0, "rate: -1.0 is not above 0"),
    }[key]
    own = {"name": "own_parts:plain", key: value}
    with pytest.raises(ConfigError, match=f"^own.toml: algorithm.{message}"):
        configured(parts, algorithm=own)


def test_options_of_adapters_are_for_modules(parts):
    own = {"name": "own_parts:pair", "dropout": "off"}
    with pytest.raises(ConfigError, match=r"dropout: is not for a tuple"):
        build(configured(parts, model=own))


def test_a_folder_or_file_imports_no_code_that_the_user_did_not_name(
    tmp_path, monkeypatch
):
    """A run folder that somebody sends brings its own module, and names it."""
    content = copy.deepcopy(TINY)
    content["version"], content["name"] = 1, "sent"
    (tmp_path / "sent.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    for table in ("model", "algorithm"):
        sent = copy.deepcopy(content)
        sent[table] |= {"name": "sent:code", "import_from": str(tmp_path)}
        (tmp_path / "config.toml").write_text(write(sent))
        (tmp_path / "summary.json").write_text("{}")
        wanted = rf"{table}\.name: 'sent:code' is code, .* --imports allows"
        with pytest.raises(RunError, match=wanted):
            fb.load(tmp_path)
        with pytest.raises(RunError, match=wanted):
            fb.personalize_from(tmp_path, tmp_path / "rows.csv")
        read_metadata({"config": write(content), "task": json.dumps(TASK)}, tmp_path)
        with pytest.raises(RunError, match=wanted):
            read_metadata({"config": write(sent), "task": json.dumps(TASK)}, tmp_path)
        config = run_folder.read_data_tables(run_folder.Folder(tmp_path))
        assert data_keys(config) == data_keys(check(copy.deepcopy(content), "here"))
    with pytest.raises(SystemExit, match="imported"):
        fb.load(tmp_path, imports=True)


def test_code_that_the_user_named_is_known(parts, tmp_path):
    config = configured(parts, algorithm={"name": "own_parts:plain"})
    (tmp_path / "config.toml").write_text(dump(config))
    again = run_folder.read_config(run_folder.Folder(tmp_path))
    assert dump(again) == dump(config)
