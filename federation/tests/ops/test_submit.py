# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A link that dies while an experiment is submitted to it is waited for; what a node
refuses reaches whoever waits for the experiment."""

import itertools
from contextlib import suppress
from types import SimpleNamespace

import pytest
from configured import POLICY, experiment, federated, method, nodes, write_rows

from fedblend.cli import main
from fedblend.errors import RunError
from fedblend_federation.flower import processes
from fedblend_federation.ops import experiments as submit_module
from fedblend_federation.ops.settings import ServerSettings, load_as
from fedblend_federation.server.checkpoint import Nodes
from fedblend_federation.server.membership import Registered
from fedblend_federation.server.run import run_in_flower
from loopback import LoopbackTransport


@pytest.fixture
def link(own, monkeypatch):
    """A link of which is known whether it is up, and how often it was asked."""
    found = SimpleNamespace(up=True, asked=0, back=3, wrong=processes.UNREACHABLE)

    def submit(settings, folder):
        found.asked += 1
        found.up = found.asked >= found.back
        if not found.up:
            raise RunError(f"flwr run: {found.wrong}")
        (folder / "summary.json").write_text("{}")
        return "7"

    monkeypatch.setattr(processes, "connect", lambda settings: None)
    monkeypatch.setattr(processes, "submit", submit)
    monkeypatch.setattr(processes, "RESTART_AFTER", 0.0)
    monkeypatch.setattr(submit_module, "is_up", lambda settings: found.up)
    monkeypatch.setattr(submit_module, "INTERVAL", 0.0)
    found.settings = load_as(ServerSettings, own / "server" / "server.toml")
    return found


def test_the_experiment_is_submitted_when_it_is_back(link, tmp_path):
    lines = []
    submit_module.run_experiment(link.settings, tmp_path, log=lines.append)
    assert link.asked == 3
    assert lines[:2] == ["the link does not respond; trying again"] * 2
    assert submit_module.run_id(tmp_path) == "7"


def test_one_that_was_never_there_is_not_waited_for(link, tmp_path):
    link.up = False
    with pytest.raises(RunError, match="unavailable"):
        submit_module.run_experiment(link.settings, tmp_path)
    assert link.asked == 1


def test_one_that_stays_away_is_waited_for_no_longer(link, tmp_path, monkeypatch):
    monkeypatch.setattr(submit_module, "LINK_RETURNS", 0.05)
    link.back = 10**9
    with pytest.raises(RunError, match="unavailable"):
        submit_module.run_experiment(link.settings, tmp_path)
    assert link.asked > 1


def test_what_a_link_refuses_is_not_asked_again(link, tmp_path, monkeypatch):
    link.wrong = "this app is too large"
    monkeypatch.setattr(submit_module, "is_up", lambda settings: True)
    with pytest.raises(RunError, match="too large"):
        submit_module.run_experiment(link.settings, tmp_path)
    assert link.asked == 1


NAMES = ("alice", "bob", "carol")


@pytest.fixture
def refusing(tmp_path, monkeypatch, own):
    """Runs an experiment on nodes of which bob refuses it, after some replies."""

    def run(name: str, replies: int) -> tuple[str, list[str]]:
        write_rows(tmp_path)
        text = federated(method(name, tmp_path, rounds=2), deadline=1.0)
        out, lines = experiment(tmp_path / "run", text), list[str]()
        reached = nodes(tmp_path, tmp_path, POLICY)
        transport, count = LoopbackTransport(reached), itertools.count()

        def changing(address: int, reply: bytes) -> list[bytes]:
            if reached[address].client == 1 and next(count) == replies - 1:
                (tmp_path / "node1" / "policy.toml").write_text(CLOSED)
            return [reply]

        transport.spoil = changing
        if not replies:
            (tmp_path / "node1" / "policy.toml").write_text(CLOSED)
        known = {
            at: Registered(NAMES[node.client], (node.client,))
            for at, node in reached.items()
        }

        def submit(settings, folder, **options):
            # What the link does, but in this process.
            with suppress(RunError):
                run_in_flower(folder, transport)
            return "7"

        monkeypatch.setattr(processes, "connect", lambda settings: None)
        monkeypatch.setattr(processes, "submit", submit)
        monkeypatch.setattr(submit_module, "link_nodes", lambda settings: Nodes(known))
        monkeypatch.setattr(submit_module, "is_up", lambda settings: True)
        monkeypatch.setattr(submit_module, "INTERVAL", 0.0)
        settings = load_as(ServerSettings, own / "server" / "server.toml")
        with pytest.raises(RunError) as error:
            submit_module.run_experiment(settings, out, log=lines.append)
        return str(error.value), lines

    return run


CLOSED = POLICY.replace('algorithms = "any"', 'algorithms = ["scaffold"]')


@pytest.mark.parametrize(
    ("name", "replies", "what"),
    [("fedavg", 0, "may not join"), ("flix", 1, "refuses"), ("fedavg", 2, "refuses")],
    ids=["joining", "enrollment", "a round"],
)
def test_a_node_that_refuses_is_named_everywhere(
    refusing, name, replies, what, tmp_path, capsys
):
    why = "policy accept.algorithms: algorithm.name"
    reason, lines = refusing(name, replies)
    assert "(bob)" in reason or "bob:" in reason
    assert why in reason
    (shown,) = [line for line in lines if line.startswith(f"bob {what}: ")]
    assert why in shown
    for command in ("status", "log"):
        assert main(["federation", command, str(tmp_path / "run")]) == 0
        said = capsys.readouterr().out.splitlines()
        assert any("bob" in line and why in line for line in said), said
