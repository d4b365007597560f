# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Stopping an experiment: nodes hear of it, and keep what they need to go on."""

import threading
import time

import pytest
from configured import POLICY, experiment, federated, method, nodes, write_rows

from fedblend.errors import RunError
from fedblend_federation.client.ledger import read_ledger
from fedblend_federation.ops.audit import entries
from fedblend_federation.server import collection
from fedblend_federation.server.run import STOPPED, run_server
from loopback import LoopbackTransport


def federation(folder, rounds=3, deadline=5.0):
    """An experiment and its nodes."""
    folder.mkdir()
    write_rows(folder)
    text = method("apfl", folder, rounds) + "[measure]\nlocal = false\n"
    run = experiment(folder / "run", federated(text, deadline))
    return run, LoopbackTransport(nodes(folder, folder, POLICY))


def stops(folder, client: int) -> list[dict]:
    found = entries(folder / f"node{client}" / "state" / "audit.jsonl")
    return [one["fields"] for one in found if one and one["event"] == "stopped"]


def test_nodes_hear_that_an_experiment_is_finished(tmp_path):
    run, transport = federation(tmp_path / "lab", rounds=1)
    run_server(run, transport, poll=0.0)
    for client in range(3):
        (stop,) = stops(tmp_path / "lab", client)
        assert stop["over"] is True
        state = tmp_path / "lab" / f"node{client}" / "state"
        assert read_ledger(state).accounts[stop["experiment"]].over


@pytest.mark.slow
def test_one_that_was_stopped_goes_on_to_the_same_models(tmp_path):
    whole, transport = federation(tmp_path / "whole")
    run_server(whole, transport, poll=0.0)
    run, transport = federation(tmp_path / "lab")

    def stop_after_the_first(round: int, rounds: int) -> None:
        if round == 1:
            (run / STOPPED).write_text("stop\n")

    with pytest.raises(RunError, match="run: was stopped; --resume goes on"):
        run_server(run, transport, poll=0.0, on_step=stop_after_the_first)
    assert [stop["over"] for stop in stops(tmp_path / "lab", 1)] == [False]
    # Another experiment makes room on the nodes, and takes nothing of this one.
    other = experiment(tmp_path / "other", (run / "config.toml").read_text())
    run_server(other, transport, poll=0.0)
    (run / STOPPED).unlink()
    run_server(run, transport, poll=0.0)
    models = [(place / "model.safetensors").read_bytes() for place in (whole, run)]
    assert models[0] == models[1]


def test_a_server_that_waits_hears_it(tmp_path, monkeypatch):
    monkeypatch.setattr(collection, "STOP_DEADLINE", 0.2)
    run, transport = federation(tmp_path / "lab", deadline=60.0)
    silent = max(transport.nodes)
    asked = []

    def spoil(address, reply):
        asked.append(address)
        described = len(asked) <= len(transport.nodes)
        return [reply] if described or address != silent else []

    transport.spoil = spoil
    timer = threading.Timer(2.0, lambda: (run / STOPPED).write_text("stop\n"))
    timer.start()
    started = time.monotonic()
    with pytest.raises(RunError, match="was stopped"):
        run_server(run, transport, poll=0.05)
    assert time.monotonic() - started < 50
    timer.join()
