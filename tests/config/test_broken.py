# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Thousands of broken configurations and checkpoints: one line each, no traceback."""

import copy
import datetime
from functools import cache

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedblend as fb
from fedblend.config import build as building
from fedblend.config import toml
from fedblend.config.config import check
from fedblend.data import datasets
from fedblend.data.dataset import DataError
from fedblend.errors import CheckpointError, ConfigError
from fedblend.simulation.checkpoint import read_about, restore, save
from tiny_config import TINY

FULL = copy.deepcopy(TINY)
FULL["algorithm"] |= {
    "name": "finetune",
    "schedule": {"name": "cosine", "unit": "round", "over": 4},
    "finetune": {
        "optimizer": {"name": "adam", "rate": 0.01},
        "steps": [1, 2, 3, 4, 5, 6],
        "batch_size": "all",
    },
}
FULL["measure"] |= {"metrics": ["loss", "recall@3"], "splits": ["test"], "on": [0, 1]}
FULL["run"]["seed"] = [1, 2]
HARD = settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["all", "official", "iid", "adam", "mlp", "fedopt", "test"])
    | st.dates()
    | st.just(datetime.time(7, 32))
)
VALUES = st.recursive(
    SCALARS,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.dictionaries(st.text(max_size=6), inside, max_size=3)
    ),
    max_leaves=6,
)


def _places(table, path=()):
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _places(value, (*path, key))


@st.composite
def broken(draw):
    """A valid configuration after one to three changes."""
    content = copy.deepcopy(FULL)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(content)) or [("version",)]))
        table = content
        for key in path[:-1]:
            table = table[key]
        what = draw(st.sampled_from(["replace", "remove", "add", "rename"]))
        if what == "replace":
            table[path[-1]] = draw(VALUES)
        elif what == "remove":
            del table[path[-1]]
        elif what == "add":
            table[draw(st.text(max_size=9))] = draw(VALUES)
        else:
            table[path[-1] + draw(st.sampled_from("sx_"))] = table.pop(path[-1])
    return content


def only_one_line(function, *arguments, errors=(ConfigError,)):
    """Call it; an error has to be of the known kinds, and one line."""
    try:
        return function(*arguments)
    except errors as error:
        assert len(str(error).splitlines()) == 1, str(error)
        assert len(str(error)) < 1000
        return None


@HARD
@given(broken())
def test_broken_tables(content):
    only_one_line(check, content, "here")


@HARD
@given(st.data())
def test_broken_text(data):
    text = toml.write(FULL)
    at = data.draw(st.integers(0, len(text)))
    rubbish = data.draw(st.text(max_size=5) | st.sampled_from(['"""', "[[", "]", "="]))
    length = data.draw(st.sampled_from([0, 1, 5, len(text)]))
    text = text[:at] + rubbish + text[at + length :]
    content = only_one_line(toml.parse, text, "here")
    if content is not None:
        only_one_line(check, content, "here")


@HARD
@given(broken())
def test_written_and_read_again(content):
    config = only_one_line(check, content, "here")
    if config is not None:
        again = toml.parse(toml.write(config.model_dump(exclude_none=True)), "here")
        assert check(again, "here") == config


@settings(HARD, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(["clients", "classes", "partition", "test", "minimum"]),
        st.integers(-2, 3000) | st.sampled_from(["iid", "dirichlet", "shards", 0.5]),
        max_size=3,
    ),
    st.sampled_from(["softmax", "logistic", "mlp", "cnn", "large_cnn"]),
    st.sampled_from([None, "logistic", "squared_error"]),
    st.sampled_from([None, ["auc"], ["recall@9"], ["r2"], ["brier"]]),
)
def test_building_what_passed_the_check(data, model, loss, metrics):
    content = copy.deepcopy(TINY)
    content["data"] |= data
    content["model"] = {"name": model} | ({"loss": loss} if loss else {})
    content["measure"]["metrics"] = metrics
    config = only_one_line(check, content, "here")
    if config is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(building.data, "load_dataset", lambda data: _digits())
            only_one_line(building.build, config, errors=(ConfigError, DataError))


@cache
def _digits():
    return datasets.load("digits")


def _simulation(algorithm=fb.scaffold):
    federated_data, _ = fb.datasets.quadratics(clients=4, dim=2)
    work = fb.Work(0.1, steps=1, batch_size=None)
    made = algorithm(fb.datasets.quadratic_loss, work)
    start = jax.numpy.zeros(2)
    return fb.simulate(made, start, federated_data, jax.random.key(0), rounds=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, its bytes, and a simulation that may take it."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    save(path, _simulation().complete(), {"config": "x"})
    return path, path.read_bytes(), _simulation()


def _read(path, run):
    read_about(path)
    restore(path, run)
    return run.round


@HARD
@given(st.data())
def test_damaged_checkpoints(saved, data):
    path, whole, run = saved
    bad = bytearray(whole)
    what = data.draw(st.sampled_from(["flip", "cut", "insert", "zero"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if what == "flip":
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    elif what == "cut":
        del bad[at:]
    elif what == "insert":
        bad[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    else:
        bad[at : at + 64] = bytes(len(bad[at : at + 64]))
    other = path.with_name("damaged")
    other.write_bytes(bad)
    found = only_one_line(_read, other, run, errors=(CheckpointError,))
    padding = bytes(bad).replace(b" ", b"") == whole.replace(b" ", b"")
    assert found is None or bytes(bad) == whole or padding


@settings(HARD, max_examples=200)
@given(st.binary(max_size=300))
def test_foreign_files(saved, content):
    path, _, run = saved
    other = path.with_name("foreign")
    other.write_bytes(content)
    with pytest.raises(CheckpointError):
        _read(other, run)


def test_another_algorithms_checkpoint(saved, tmp_path):
    with pytest.raises(CheckpointError, match="another model, algorithm or version"):
        restore(saved[0], _simulation(fb.fedavg))
    with pytest.raises(CheckpointError, match="No such file"):
        restore(tmp_path / "nothing", saved[2])
