# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A configuration on nodes comes to what it comes to in a simulation."""

from pathlib import Path

import numpy as np
import pytest
from configured import (
    AROUND,
    CLIENTS,
    experiment,
    federated,
    largest_gap,
    method,
    nodes,
    simulated,
    simulation,
    write_rows,
)

from fedblend.experiment import toml
from fedblend.experiment.config import check
from fedblend.experiment.federation.leading import lead
from fedblend.experiment.run import run_config
from fedblend.experiment.section import RunError
from fedblend.runtime.wire import unpack
from loopback import Box

QUICK = ("privacy",)
"""Of those around an algorithm; the others take as long again."""
SILENT = '[accept]\nalgorithms = "any"\n[metrics]\nnames = []\n'
"""Without measures no figures are drawn, which takes longer than the rounds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


def test_a_federation_comes_to_what_a_simulation_comes_to(place, tmp_path):
    how = method("apfl", place, rounds=3)
    config = check(toml.parse(simulated(how, place), "test"), "test")
    there = run_config(config, tmp_path / "simulated")
    run = experiment(tmp_path / "run", federated(how))
    here = lead(run, Box(nodes(place, tmp_path)), poll=0.0)
    one, other = here["runs"][0], there["runs"][0]
    assert one["bits"] == other["bits"]
    for model in ("personal", "shared", "local"):
        for metric in ("accuracy", "loss"):
            found, wanted = (
                run["measures"]["test"][model][metric]["mean"] for run in (one, other)
            )
            assert found == pytest.approx(wanted, abs=1e-6)
    (mine, _), (theirs, _) = (
        unpack((tmp_path / name / "model.safetensors").read_bytes())
        for name in ("run", "simulated")
    )
    for name, array in theirs.items():
        np.testing.assert_allclose(mine[name], array, atol=1e-6)
    assert (tmp_path / "run" / "harm.csv").exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in AROUND
    ],
)
def test_what_is_around_an_algorithm_comes_to_the_same(name, place, tmp_path):
    how = method(name, place, rounds=2) + "[measure]\nlocal = false\n"
    run = experiment(tmp_path / "run", federated(how))
    box = Box(nodes(place, tmp_path, SILENT))
    # Whoever draws noise from a secret comes to something else.
    secret = name == "privacy"
    homes = [tmp_path / f"node{client}" for client in range(CLIENTS)]
    there = simulation(simulated(how, place))
    if secret:
        hidden = experiment(tmp_path / "hidden", federated(how))
        lead(hidden, box, poll=0.0)
        assert largest_gap(hidden, homes, there) > 1e-3
    lead(run, box, poll=0.0, shared_seed=True)
    assert largest_gap(run, homes, there) <= 1e-6


def test_a_node_refuses_what_its_policy_does_not_allow(place, tmp_path):
    refusing = nodes(place, tmp_path, '[accept]\nalgorithms = ["fedavg"]\n')
    text = federated(method("apfl", place, rounds=4), deadline=0.2)
    with pytest.raises(RunError, match=r"accept\.algorithms.*apfl"):
        lead(experiment(tmp_path / "run", text), Box(refusing), poll=0.0)
    logged = (tmp_path / "node0" / "state" / "audit.jsonl").read_text()
    assert "accept.algorithms" in logged.splitlines()[-1]
