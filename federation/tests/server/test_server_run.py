# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A configuration on nodes comes to what it comes to in a simulation."""

import re
import shutil
from pathlib import Path

import jax
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

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.errors import RunError
from fedblend.runs.run import run_config
from fedblend.simulation.serialize import build_tree, unpack
from fedblend.trees import precision
from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.server.run import ENROLL_AGAIN, run_server
from loopback import LoopbackTransport

QUICK = ("privacy",)
"""Of those around an algorithm; the others take as long again."""
SILENT = '[accept]\nalgorithms = "any"\n[metrics]\nnames = []\n'
"""Without measures no figures are drawn, which takes longer than the rounds."""
ALONE = "[measure]\nlocal = false\n"
"""Nobody trains alone, which takes longer still."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


def test_a_federation_comes_to_what_a_simulation_comes_to(place, tmp_path):
    how = method("apfl", place, rounds=3) + "[measure]\nlocal = 3\n"
    config = check(toml.parse(simulated(how, place), "test"), "test")
    there = run_config(config, tmp_path / "simulated")
    run = experiment(tmp_path / "run", federated(how))
    here = run_server(run, LoopbackTransport(nodes(place, tmp_path)), poll=0.0)
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


@pytest.mark.slow
def test_a_node_trains_alone_to_its_own_best_round(place, tmp_path):
    run = experiment(tmp_path / "run", federated(method("fedavg", place, rounds=1)))
    summary = run_server(run, LoopbackTransport(nodes(place, tmp_path)), poll=0.0)
    (one,) = summary["runs"]
    assert one["alone"]["rounds"] is None
    assert one["alone"]["chosen_on"] == "its own rows"
    assert one["measures"]["test"]["local"]["accuracy"]["clients"] == CLIENTS
    said = "".join(path.read_text() for path in tmp_path.rglob("audit.jsonl"))
    rounds = [int(number) for number in re.findall(r'"rounds_alone": ?(\d+)', said)]
    assert len(rounds) == CLIENTS
    assert all(0 <= number <= 20 * 20 for number in rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in AROUND
    ],
)
def test_what_is_around_an_algorithm_comes_to_the_same(name, place, tmp_path):
    how = method(name, place, rounds=2) + ALONE
    run = experiment(tmp_path / "run", federated(how))
    transport = LoopbackTransport(nodes(place, tmp_path, SILENT))
    # Noise from the operating system comes to something else.
    secret = name == "privacy"
    homes = [tmp_path / f"node{client}" for client in range(CLIENTS)]
    there = simulation(simulated(how, place))
    if secret:
        own = how.replace('noise_from = "seed"', 'noise_from = "system"')
        hidden = experiment(tmp_path / "hidden", federated(own))
        run_server(hidden, transport, poll=0.0)
        assert largest_gap(hidden, homes, there) > 1e-3
    run_server(run, transport, poll=0.0)
    assert largest_gap(run, homes, there) <= 1e-6


class Apart(LoopbackTransport):
    """Nodes whose process has the usual width of numbers."""

    def send(self, outgoing):
        with precision("float32"):
            super().send(outgoing)


@pytest.mark.slow
def test_numbers_of_twice_the_width(place, tmp_path):
    how = method("fedavg", place, rounds=1) + ALONE
    how = how.replace("seed = 5", 'seed = 5\nprecision = "float64"')
    run = experiment(tmp_path / "run", federated(how))
    run_server(run, Apart(nodes(place, tmp_path, SILENT)), poll=0.0)  # pyright: ignore
    with precision("float64"):
        there = simulation(simulated(how, place))
    homes = [tmp_path / f"node{client}" for client in range(CLIENTS)]
    assert largest_gap(run, homes, there) <= 1e-12


def test_a_node_refuses_what_its_policy_does_not_allow(place, tmp_path):
    refusing = nodes(place, tmp_path, '[accept]\nalgorithms = ["fedavg"]\n')
    text = federated(method("apfl", place, rounds=4), deadline=0.2)
    with pytest.raises(RunError, match=r"accept\.algorithms.*apfl"):
        run_server(
            experiment(tmp_path / "run", text), LoopbackTransport(refusing), poll=0.0
        )
    logged = (tmp_path / "node0" / "state" / "audit.jsonl").read_text()
    assert "accept.algorithms" in logged.splitlines()[-1]


def test_a_client_that_lost_its_states_can_be_enrolled_again(place, tmp_path):
    text = federated(method("apfl", place, rounds=4) + ALONE, deadline=60.0)
    transport = LoopbackTransport(nodes(place, tmp_path, SILENT))
    # Damaged replies end a round at once, where silence would wait for the deadline.
    transport.spoil = lambda address, data: (
        [b"damaged"] if messages.decode(data).round == 2 else [data]
    )
    with pytest.raises(RunError, match="--resume"):
        run_server(experiment(tmp_path / "run", text), transport, poll=0.0)
    shutil.rmtree(tmp_path / "node1" / "state")
    transport = LoopbackTransport(nodes(place, tmp_path, SILENT))
    with pytest.raises(RunError, match=r"client 1 refused.*not known here"):
        run_server(tmp_path / "run", transport, poll=0.0)
    (tmp_path / "run" / "server" / ENROLL_AGAIN).write_text('{"clients": [1]}')
    assert run_server(tmp_path / "run", transport, poll=0.0)["runs"][0]["round"] == 4
    assert not (tmp_path / "run" / "server" / ENROLL_AGAIN).exists()


def test_a_change_of_the_policy_counts_from_the_next_message_on(place, tmp_path):
    transport = LoopbackTransport(nodes(place, tmp_path, SILENT))
    text = federated(method("apfl", place, rounds=4) + ALONE, deadline=60.0)
    policy = tmp_path / "node1" / "policy.toml"
    before = policy.read_text()

    def once_it_has_begun(address, data):
        if (tmp_path / "run" / "server" / "checkpoint").exists():
            policy.write_text('[accept]\nalgorithms = ["fedavg"]\n')
        return [data]

    transport.spoil = once_it_has_begun
    with pytest.raises(RunError, match=r"accept\.algorithms.*--resume"):
        run_server(experiment(tmp_path / "run", text), transport, poll=0.0)
    policy.write_text(before)
    transport.spoil = lambda address, data: [data]
    assert run_server(tmp_path / "run", transport, poll=0.0)["runs"][0]["round"] == 4


def test_under_noise_a_round_is_computed_for_one_message(place, tmp_path):
    transport = LoopbackTransport(
        nodes(place, tmp_path, SILENT + "[protect]\nclip = 1.0\nnoise = 0.5\n")
    )
    asked, send = [], transport.send

    def recording(outgoing):
        asked.extend(outgoing.values())
        send(outgoing)

    transport.send = recording  # pyright: ignore
    text = federated(method("fedavg", place, rounds=2) + ALONE)
    run_server(experiment(tmp_path / "run", text), transport, poll=0.0)
    data = next(
        data
        for data in reversed(asked)
        if (messages.decode(data).kind, messages.decode(data).client) == ("round", 1)
    )
    node = next(node for node in transport.nodes.values() if node.client == 1)
    message = messages.decode(data)
    assert messages.decode(node.reply(data)).kind == "round"
    executor = node.permissions().executor(
        states.read_terms(node.folder / message.experiment)
    )
    told = build_tree(message.arrays, executor.message._replace(round=None))
    moved = jax.tree.map(lambda leaf: leaf + np.float32(1e-3), told)
    refused = messages.decode(node.reply(messages.encode(message, moved)))
    assert "another message" in refused.fields["reason"]
