# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated select over Flower: only rows that are used, the simulator's numbers."""

import numpy as np
import pytest
from configured import OPEN, few, largest_gap, simulation
from movies import MOVIES_METHOD, ON_NODES, in_one, write_movies

from fedblend.config import toml
from fedblend.config.config import check
from fedblend_federation.ops import experiments
from fedblend_federation.ops.local_cluster import local_cluster

pytestmark = pytest.mark.slow
NAMES = ("alice", "bob", "carol")


def test_select_comes_to_the_simulators_numbers(tmp_path):
    ratings, out = write_movies(tmp_path), tmp_path / "out"
    rows = {
        name: dict(np.load(tmp_path / f"rows{client}.npz"))
        for client, name in enumerate(NAMES)
    }
    policy = few(OPEN.replace('["', '["select", "'))
    text = ON_NODES.replace("60.0", "900.0") + MOVIES_METHOD
    with local_cluster(tmp_path / "lab", rows, policy=policy) as made:
        config = check(toml.parse(text, "test"), "test")
        experiments.open_folder(out, config, made.settings, resume=False)
        experiments.run_experiment(made.settings, out)
        homes = [made.folder / "nodes" / name for name in NAMES]
        gap = largest_gap(out, homes, simulation(in_one(ratings)))
    print(f"select: {'equal to the bit' if gap == 0 else f'within {gap:.1e}'}")
    assert gap <= 1e-6
