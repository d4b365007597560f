# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Real Flower on loopback: one node hosts all clients, and comes to the simulator's
numbers.

``pytest -n 0 -m slow federation/tests/test_several_clients_on_flower.py``, minutes.
"""

import numpy as np
import pytest
from configured import (
    CLIENTS,
    POLICY,
    federated,
    largest_gap,
    method,
    simulated,
    simulation,
    write_rows,
)

from fedblend.config import toml
from fedblend.config.config import check
from fedblend_federation.client.ledger import read_ledger
from fedblend_federation.ops import experiments
from fedblend_federation.ops.local_cluster import local_cluster, processes_of
from fedblend_federation.ops.registration import members

pytestmark = pytest.mark.slow
DEADLINE = 900.0
"""Seconds: the machine may be busy."""
TOLERANCE = 1e-6
"""A dozen roundings of float32, where programs round differently; see
``test_on_flower``."""


def test_one_node_with_all_clients_comes_to_the_simulators_numbers(tmp_path):
    place = write_rows(tmp_path)
    rows = [dict(np.load(place / f"rows{client}.npz")) for client in range(CLIENTS)]
    folder = tmp_path / "lab"
    with local_cluster(folder, {"gateway": rows}, policy=POLICY) as made:
        (gateway,) = members(made.settings)
        assert (gateway.clients, gateway.status) == ((0, 1, 2), "online")
        gaps = {}
        for name in ("fedavg", "apfl"):
            how = method(name, place, rounds=3) + "[measure]\nlocal = false\n"
            config = check(toml.parse(federated(how, DEADLINE), "test"), "test")
            out = tmp_path / name
            experiments.open_folder(out, config, made.settings, resume=False)
            experiments.run_experiment(made.settings, out)
            homes = []
            for client in range(CLIENTS):
                homes.append(tmp_path / f"{name}{client}")
                homes[-1].mkdir()
                own = made.home("gateway") / "state" / f"client-{client}"
                (homes[-1] / "state").symlink_to(own)
                assert read_ledger(own).answers == 3 * (1 + len(gaps))
            gaps[name] = largest_gap(out, homes, simulation(simulated(how, place)))
        print(gaps)
        assert max(gaps.values()) <= TOLERANCE
    assert processes_of(folder) == []
