# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Attackers in a configuration: who lies, and what is refused."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.config.build import build
from fedblend.config.config import check, dump, loads
from fedblend.config.tables.privacy import report
from fedblend.errors import ConfigError
from fedblend.runs.run import work_alone
from fedblend.simulation.simulate import set_up

NODES = {"partition": "nodes", "clients": 3, "kind": "binary", "shape": [2]}


def config(attack, **tables):
    return check(
        {
            "version": 1,
            "name": "lies",
            "data": {"source": "digits", "partition": "iid", "clients": 5},
            "model": {"name": "softmax"},
            "algorithm": {"name": "fedavg", "rate": 0.1, "steps": 1, "batch_size": 8},
            "run": {"rounds": 2, "every": 2},
            "attack": attack,
            **tables,
        },
        "here",
    )


def test_an_attack_is_the_transform_and_survives_being_written():
    one = config({"how": "negate", "clients": [1, 3], "factor": 4.0})
    assert loads(dump(one), "there") == one
    built = build(one)
    honest = build(config(None)).algorithm
    who = np.isin(np.arange(5), (1, 3))
    by_hand = fb.transforms.byzantine(honest, "negate", attackers=who, factor=4.0)
    lone = fb.simulate(
        by_hand, built.model.init, built.federated_data, jax.random.key(0), rounds=2
    )
    found, expected = (run.complete().shared for run in (set_up(built.spec), lone))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_labels_are_flipped_before_anybody_trains():
    lies = config({"how": "flip_labels", "clients": [2]})
    honest, flipped = (build(one).federated_data for one in (config(None), lies))
    for client in range(5):
        before, after = (of.train.rows(client)[1] for of in (honest, flipped))
        np.testing.assert_array_equal(after, 9 - before if client == 2 else before)
        tests = [of.splits["test"].rows(client)[1] for of in (honest, flipped)]
        np.testing.assert_array_equal(*tests)
    assert work_alone(lies) != work_alone(config(None))
    updates = config({"how": "negate", "clients": [2]})
    assert work_alone(updates) == work_alone(config(None))


@pytest.mark.parametrize(
    ("attack", "tables", "line"),
    [
        ({"how": "negate", "clients": [5]}, {}, "attack.clients: 5 is no client"),
        ({"how": "flip_labels", "clients": [9]}, {}, "attack.clients: 9 is no client"),
        ({"how": "negate", "clients": []}, {}, "attack.clients"),
        ({"how": "frob", "clients": [0]}, {}, "attack.how: "),
        ({"how": "negate"}, {}, "attack.clients: is missing"),
        (
            {"how": "flip_labels", "clients": [0], "factor": 2.0},
            {},
            "attack.factor: is for updates",
        ),
        (
            {"how": "negate", "clients": [0]},
            {"data": NODES},
            "attack: is not for a federation; it makes clients of a simulation lie",
        ),
        (
            {"how": "negate", "clients": [0]},
            {"algorithm": {"name": "local_only", "rate": 0.1}},
            "attack: local_only sends nothing; leave it out",
        ),
        (
            {"how": "flip_labels", "clients": [0]},
            {"data": {"source": "two_sines", "partition": "by_key"}},
            "attack.how: federated_data: .* is not labels of classes",
        ),
    ],
)
def test_what_is_no_attack_is_refused_in_one_line(attack, tables, line):
    with pytest.raises(ConfigError, match=line) as caught:
        build(config(attack, **tables))
    assert "\n" not in str(caught.value)


def test_a_private_run_with_attackers_has_no_guarantee():
    private = {"clip": 1.0, "noise": 1.0, "delta": 1e-5}
    lies = config({"how": "negate", "clients": [0]}, privacy=private)
    found = report(lies, 5, False)["privacy"]
    assert found["epsilon"] is None and "[attack]" in found["sentence"]
