# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Raw tables on real Flower: three nodes find the preprocessing of a simulation."""

import os
import re
import shutil

import pytest
from test_raw_tables import POLICY, federated, simulated
from test_raw_tables import place as place
from test_raw_tables import raw as raw

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.runs import run_folder
from fedblend.runs.run import run_config
from fedblend.runs.run_folder import Folder
from fedblend_federation.ops import experiments, local_cluster

pytestmark = pytest.mark.slow
NAMES = ("alice", "bob", "carol")


def test_flower_comes_to_the_simulators_numbers(place, raw, tmp_path, monkeypatch):
    def write_table(home, rows, policy):
        shutil.copy(rows, home / "rows.csv")
        settings = home / "node.toml"
        text = re.sub(
            r"(?m)^#? ?target = .*$", 'target = "outcome"', settings.read_text()
        )
        settings.write_text(text)
        (home / "policy.toml").write_text(policy)

    monkeypatch.setattr(local_cluster, "write_rows", write_table)
    there = run_config(
        check(toml.parse(simulated(place), "test"), "test"), tmp_path / "simulated"
    )
    rows = {name: place / f"node{client}.csv" for client, name in enumerate(NAMES)}
    os.nice(5)
    with local_cluster.local_cluster(tmp_path / "f", rows, policy=POLICY) as made:
        config = check(toml.parse(federated(raw), "test"), "test")
        experiments.open_folder(tmp_path / "run", config, made.settings, resume=False)
        experiments.run_experiment(made.settings, tmp_path / "run")
    here = run_folder.read_summary(Folder(tmp_path / "run"))
    mine, other = (
        run_folder.read_preprocessing(Folder(tmp_path / name), 0)
        for name in ("run", "simulated")
    )
    assert mine is not None and other is not None
    assert mine.fitted == other.fitted
    one, two = (of["runs"][0]["measures"]["test"] for of in (here, there))
    for model in ("personal", "shared"):
        assert one[model]["loss"]["mean"] == pytest.approx(
            two[model]["loss"]["mean"], rel=1e-5
        )
