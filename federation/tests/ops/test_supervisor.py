# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which programs a node consists of, and how a service ends."""

import sys

import pytest
from edits import edit
from typer.testing import CliRunner

from fedblend.cli import app
from fedblend.errors import RunError
from fedblend_federation.flower import processes
from fedblend_federation.ops import supervisor
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as


@pytest.fixture
def served(monkeypatch) -> list:
    """What this process becomes, or how it carries, in place of doing it."""
    found = []
    monkeypatch.setattr(
        supervisor.os, "execve", lambda program, command, environ: found.append(command)
    )
    monkeypatch.setattr(
        supervisor, "serve_carrier", lambda settings, **how: found.append(how)
    )
    monkeypatch.setattr(processes, "program", lambda name: name)
    return found


def serve(path, *options: str) -> None:
    result = CliRunner().invoke(app, ["federation", "node", str(path), *options])
    assert result.exit_code == 0, result.output


def test_a_node_is_one_process_with_our_carrier(own, served):
    path = own / "nodes/alice/node.toml"
    serve(path)
    assert served[0]["with_rows"] is True
    command = processes.node_command(path)
    assert command[-3:] == ["federation", "node", str(path)]
    assert not any("flower" in word for word in command)


def test_without_rows_it_is_this_process(own, served):
    serve(own / "nodes/alice/node.toml", "--flower-only")
    assert served[0]["with_rows"] is False


@pytest.mark.parametrize("where", ["option", "file"])
def test_flowers_supernode_is_a_choice(own, served, where):
    path = own / "nodes/alice/node.toml"
    if where == "file":
        edit(path, "[data]", "supernode = true\n[data]")
    serve(path, *(["--supernode"] if where == "option" else []))
    guard = ["-m", "fedblend_federation.flower.port_guard", "flower-supernode"]
    assert served[0][1:4] == guard
    socket = load_as(NodeSettings, path).worker_socket
    assert served[0][-1] == f'socket="{socket}"'


def test_a_link_that_ends_is_one_line(own, monkeypatch):
    settings = load_as(ServerSettings, own / "server/server.toml")
    program = [sys.executable, "-c", "print('x' * 20); exit(3)"]
    monkeypatch.setattr(processes, "link_command", lambda settings: program)
    monkeypatch.setattr(supervisor, "is_up", lambda settings: False)
    monkeypatch.setattr(supervisor, "INTERVAL", 0.02)
    with pytest.raises(RunError, match=r"ended with code 3; see .*link\.log"):
        supervisor.serve_link(settings)
    assert "x" * 20 in (settings.folder / "link.log").read_text()


def test_a_link_is_ended_with_its_service(own, monkeypatch):
    """Its keys are registered once it is up, and an interrupt ends it."""
    settings = load_as(ServerSettings, own / "server/server.toml")
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(processes, "link_command", lambda settings: program)
    monkeypatch.setattr(supervisor, "is_up", lambda settings: True)
    registered, started = [], []
    monkeypatch.setattr(supervisor.registration, "register", registered.append)
    start = processes.start
    monkeypatch.setattr(
        processes, "start", lambda *of: started.append(start(*of)) or started[0]
    )

    def ready() -> None:
        raise KeyboardInterrupt

    supervisor.serve_link(settings, ready)
    assert registered == [settings]
    assert started[0].poll() is not None
