# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL by configuration, and what a run says of the weights it learned."""

import csv
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.runs import results
from fedblend.runs.run import run_config
from tiny_config import TINY


def config(**options: Any):
    """The tiny configuration with APFL, or one of its variants."""
    table = deepcopy(TINY)
    table["algorithm"] |= {"name": "apfl", "alpha": 0.5, **options}
    return check(table, "here")


@pytest.mark.usefixtures("compiled")
def test_a_run_writes_its_weights_and_says_on_what_they_were_learned(tmp_path):
    said = []
    summary = run_config(config(rate=1.0), tmp_path / "out", on_warning=said.append)
    assert [word for word in said if "alpha was learned on the training rows" in word]
    assert [word for word in said if word in summary["warnings"]] == said
    with (tmp_path / "out" / "clients.csv").open() as file:
        alphas = [float(row["alpha"]) for row in csv.DictReader(file)]
    assert len(alphas) == 6
    assert np.isclose(np.mean(alphas), summary["alpha"]["mean"])
    assert min(alphas) == summary["alpha"]["smallest"] < summary["alpha"]["largest"]


@pytest.fixture(scope="module")
def run():
    on = problems.classes()
    algorithm = fb.apfl(on.loss, fb.Work(0.2, steps=3, batch_size=None), alpha=0.5)
    key = jax.random.key(0)
    return fb.simulate(
        algorithm, on.params, on.federated_data, key, rounds=1
    ).complete()


@pytest.mark.parametrize(
    ("learn", "held_out", "word"),
    [
        ("fixed", 0.0, None),
        ("round", 0.0, "on the training rows"),
        ("step", 0.5, "2 of 7 clients have too few training rows to hold out 0.5"),
    ],
)
def test_what_is_warned_of(run, learn, held_out, word):
    options = SimpleNamespace(learn=learn, held_out=held_out)
    columns, found, warnings = results.diagnostics(run, options)
    assert 0 < found["alpha"]["smallest"] <= found["alpha"]["mean"] < 1
    assert len(columns["alpha"]) == 7
    assert len(warnings) == (word is not None)
    assert all(word in warning for warning in warnings)


def test_a_method_without_weights_says_nothing():
    on = problems.classes()
    algorithm = fb.fedavg(on.loss, fb.Work(0.2, steps=1, batch_size=None))
    key = jax.random.key(0)
    done = fb.simulate(
        algorithm, on.params, on.federated_data, key, rounds=0
    ).complete()
    assert results.diagnostics(done, SimpleNamespace()) == ({}, {}, [])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"alpha": 1.5}, r"algorithm.alpha"),
        ({"alpha": None}, r"algorithm.alpha"),
        ({"learn": "never"}, r"algorithm.learn"),
        (
            {"learn": "fixed", "held_out": 0.2},
            "algorithm.held_out: 0.2 is not allowed with learn",
        ),
        (
            {"learn": "fixed", "alpha_rate": 0.2},
            "algorithm.alpha_rate: 0.2 is not allowed with learn",
        ),
        ({"held_out": 0.95}, r"algorithm.held_out.* in \[0, 0.9\]"),
        ({"hand_back": 3}, "algorithm.hand_back: 3 is not allowed without held_out"),
        ({"held_out": 0.2, "hand_back": 0}, r"algorithm.hand_back"),
        ({"name": "apfl_agnostic", "q_rate": -1.0}, r"algorithm.q_rate"),
        (
            {"name": "apfl_agnostic", "q_rate": 0.1, "mix": "outputs"},
            r"algorithm.mix",
        ),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(options, word):
    with pytest.raises(ConfigError, match=word) as error:
        config(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"learn": "round", "alpha_rate": 0.3, "held_out": 0.2, "mix": "outputs"},
        {"learn": "fixed", "fresh": True, "aggregated": False},
        {"name": "apfl_agnostic", "q_rate": 0.1, "held_out": 0.2},
        {"alpha": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]},
    ],
)
def test_every_setting_builds(options):
    chosen: Any = config(**options).algorithm
    on = problems.classes()
    algorithm = chosen.build(on.loss, None, 7)
    shard = jax.device_put(on.federated_data.train.shard(1))
    state = jax.eval_shape(
        lambda: algorithm.enroll(on.params, shard, jax.random.key(0))
    )
    assert jax.tree.leaves(state[1].alpha)
