# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL by configuration: whose rows are whose, and what is refused."""

import json

import numpy as np
import pytest

from fedblend.config import toml
from fedblend.config.build import build
from fedblend.config.config import check, dump
from fedblend.data.dataset import DataError
from fedblend.errors import ConfigError
from fedblend.runs.run import run_config

pytestmark = pytest.mark.usefixtures("compiled")


def config(central, **tables):
    content = {
        "version": 1,
        "name": "mixed",
        "data": {"source": "digits", "partition": "iid", "clients": 4},
        "model": {"name": "softmax"},
        "algorithm": {"name": "fedavg", "rate": 0.3, "steps": 2, "batch_size": 8},
        "run": {"rounds": 12, "every": 12},
        "measure": {"local": False, "splits": ["test"]},
        "central": central,
        **tables,
    }
    return check(content, "here")


def test_the_servers_classes_are_no_clients():
    built = build(config({"how": "one_way", "classes": [8, 9], "test": 0.25}))
    assert built.server is not None
    labels = built.federated_data.train.examples[1]
    assert set(np.unique(labels)) == set(range(8))
    own = built.server.train.rows(0)[1]
    assert set(np.unique(own)) == {8, 9}
    assert built.server.test is not None
    total = built.server.train.total + built.server.test.total
    assert built.server.test.total == pytest.approx(0.25 * total, abs=1)
    everything = total + sum(s.total for s in built.federated_data.splits.values())
    assert everything == built.facts["rows"]


def test_a_share_is_drawn_from_the_seed():
    table = {"how": "parallel", "share": 0.3}
    sizes = [build(config(table)).server.train.total for _ in range(2)]  # pyright: ignore
    assert sizes[0] == sizes[1] == pytest.approx(0.3 * 0.8 * 1797, abs=2)


@pytest.mark.slow
def test_a_run_learns_the_servers_classes_and_says_so(tmp_path):
    table = {"how": "two_way", "classes": [8, 9], "steps": 2, "batch_size": 32}
    summary = run_config(config(table, run={"rounds": 12, "seed": [0, 1]}), tmp_path)
    for one in summary["runs"]:
        assert one["central"]["test"]["accuracy"] > 0.7
        assert one["central"]["train"]["rows"] > one["central"]["test"]["rows"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


@pytest.mark.parametrize(
    ("central", "said"),
    [
        ({"how": "one_way"}, "classes, share or file: is missing"),
        ({"how": "one_way", "share": 0.1, "classes": [1]}, "several are given"),
        ({"how": "one_way", "share": 0.1, "steps": 2}, "steps: goes with central"),
        ({"how": "parallel", "share": 0.1, "upload": True}, "upload: goes with"),
        ({"how": "both", "share": 0.1}, "central.how"),
        ({"how": "one_way", "share": 0.1, "weight": 1.0}, "central.weight"),
    ],
)
def test_tables_that_make_no_sense(central, said):
    with pytest.raises(ConfigError, match=said):
        config(central)


@pytest.mark.parametrize(
    "central",
    [
        {"how": "parallel", "share": 0.3},
        {"how": "one_way", "share": 0.3},
        {"how": "two_way", "share": 0.3, "upload": True},
    ],
)
def test_what_a_run_writes_out_can_be_read_again(central):
    """With all defaults: else no such run could be resumed."""
    written = config(central)
    assert check(toml.parse(dump(written), "run"), "run") == written


def test_rows_that_cannot_be_divided_so():
    with pytest.raises(DataError, match=r"central\.classes: no row is of class 12"):
        build(config({"how": "one_way", "classes": [12]}))
    with pytest.raises(DataError, match="1797 of 1797 rows"):
        build(config({"how": "one_way", "classes": list(range(10))}))
    with pytest.raises(DataError, match=r"central\.batch_size: 5000 is more"):
        build(config({"how": "one_way", "share": 0.1, "batch_size": 5000}))


def test_an_adaptive_server_under_parallel_training(tmp_path):
    server = {"name": "adam", "rate": 0.01}
    fedadam = {"name": "fedopt", "rate": 0.3, "steps": 2, "batch_size": 8}
    table = {"how": "parallel", "share": 0.1}
    with pytest.raises(ConfigError, match=r"^central: this server .* use one_way, or"):
        run_config(
            config(table, algorithm={**fedadam, "server": server}), tmp_path / "run"
        )


def test_clients_whose_steps_are_not_plain(tmp_path):
    prox = {"name": "fedprox", "rate": 0.1, "mu": 0.1, "steps": 2, "batch_size": 8}
    table = {"how": "two_way", "share": 0.1}
    with pytest.raises(ConfigError, match=r"^central: these clients do not take plain"):
        run_config(config(table, algorithm=prox), tmp_path / "run")
    built = build(config({"how": "parallel", "share": 0.1, "rate": 0.2}))
    assert any(line.startswith("central.rate: parallel") for line in built.warnings)
    hidden = {"clip": 1.0, "noise": 1.0, "delta": 1e-3}
    table = {"how": "parallel", "share": 0.1, "rate": 0.2}
    lines = build(config(table, privacy=hidden)).warnings
    assert any(line.startswith("central.how: [privacy] clips") for line in lines)
    with pytest.raises(ConfigError, match=r"central\.upload: would send gradients"):
        build(
            config(
                {"how": "two_way", "share": 0.1, "upload": True},
                privacy={"clip": 1.0, "noise": 1.0, "delta": 1e-3},
            )
        )
