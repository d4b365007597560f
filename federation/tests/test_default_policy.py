# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The experiments of the documents run under the policy that ``init`` writes."""

import re
from pathlib import Path

import numpy as np
import pytest
from configured import experiment

from fedblend.config.config import dump
from fedblend_federation.client.node import node_of
from fedblend_federation.ops.credentials import template
from fedblend_federation.ops.local_cluster import POLICY, demo_config, demo_rows
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

DOCUMENT = Path(__file__).parents[2] / "docs" / "federation.md"


def node_with(home: Path, client: int, data: str, policy: str | None = None):
    (home / "policy.toml").write_text(policy or template("policy.toml"))
    (home / "node.toml").write_text(
        f'version = 1\nserver = "127.0.0.1:8000"\nclient = {client}\nca = "ca"\n'
        f'key = "key"\nfolder = "state"\npolicy = "policy.toml"\n[data]\n{data}'
    )
    return node_of(load_as(NodeSettings, home / "node.toml"))


def test_the_trial_of_the_documents(tmp_path):
    text, *_ = re.findall(r"^```toml\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    rng, nodes = np.random.default_rng(0), {}
    for client in range(2):
        home = tmp_path / f"node{client}"
        home.mkdir()
        ages, ill = rng.integers(20, 90, 80), rng.integers(0, 2, 80)
        lines = [
            f"{age / 10},{2 * sick + rng.normal()},{('well', 'ill')[sick]}"
            for age, sick in zip(ages, ill, strict=True)
        ]
        (home / "rows.csv").write_text("\n".join(["age,dose,state", *lines]))
        data = 'file = "rows.csv"\ntarget = "state"\n'
        nodes[client] = node_with(home, client, data)
    short = text.replace("rounds = 50", "rounds = 2") + "[measure]\nlocal = false\n"
    summary = run_server(
        experiment(tmp_path / "run", short), LoopbackTransport(nodes), poll=0.0
    )
    (run,) = summary["runs"]
    assert (run["round"], run["dropped"]) == (2, 0)
    assert "accuracy" in str(run)


@pytest.mark.slow
def test_the_experiments_of_the_demonstration_one_after_the_other(tmp_path):
    nodes = {}
    for client, (name, rows) in enumerate(demo_rows().items()):
        home = tmp_path / name
        home.mkdir()
        np.savez(home / "rows.npz", inputs=rows["inputs"], targets=rows["targets"])
        nodes[client] = node_with(home, client, 'file = "rows.npz"\n', POLICY)
    for name in ("apfl", "flix"):
        config = demo_config(name)
        run = config.run.model_copy(update={"rounds": 1, "every": 1})
        measure = config.measure.model_copy(update={"local": False})
        short = config.model_copy(update={"run": run, "measure": measure})
        summary = run_server(
            experiment(tmp_path / f"run-{name}", dump(short)),
            LoopbackTransport(nodes),
            poll=0.0,
        )
        (found,) = summary["runs"]
        assert (found["round"], found["dropped"]) == (1, 0)
