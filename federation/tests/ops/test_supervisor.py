# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which programs a node consists of, and that a program which ends is started again."""

import sys

import pytest
from edits import edit

from fedblend_federation.flower import processes
from fedblend_federation.ops import supervisor
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.ops.supervisor import Program


@pytest.fixture
def kept(monkeypatch) -> list:
    """What is kept running, in place of running it."""
    found = []
    monkeypatch.setattr(
        supervisor, "_keep", lambda programs, check, log: found.append(dict(programs))
    )
    monkeypatch.setattr(
        supervisor, "serve_carrier", lambda settings, **how: found.append(how)
    )
    monkeypatch.setattr(processes, "program", lambda name: name)
    return found


def serve(path, **options) -> None:
    supervisor.serve_node(load_as(NodeSettings, path), path, **options)


def test_a_node_is_one_process_with_our_carrier(own, kept):
    path = own / "nodes/alice/node.toml"
    serve(path)
    ((name, program),) = kept[0].items()
    assert name == "node"
    assert program.folder == own / "nodes/alice/state"
    assert program.command[-4:] == ["federation", "node", str(path), "--once"]
    assert not any("flower" in word for word in program.command)


def test_without_rows_it_is_this_process(own, kept):
    serve(own / "nodes/alice/node.toml", flower_only=True)
    assert kept[0]["with_rows"] is False


@pytest.mark.parametrize("where", ["option", "file"])
def test_flowers_supernode_is_a_choice(own, kept, where):
    path = own / "nodes/alice/node.toml"
    if where == "file":
        edit(path, "[data]", "supernode = true\n[data]")
    serve(path, supernode=where == "option")
    assert list(kept[0]) == ["worker", "node"]
    command = list(kept[0]["node"].command)
    assert command[1:4] == [
        "-m",
        "fedblend_federation.flower.port_guard",
        "flower-supernode",
    ]
    assert f'settings="{path}"' in command[-1]
    serve(path, supernode=where == "option", flower_only=True)
    assert list(kept[1]) == ["node"]
    assert "settings" not in kept[1]["node"].command[-1]


def test_a_program_that_ends_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "RESTART_AFTER", 0.0)
    monkeypatch.setattr(supervisor, "INTERVAL", 0.02)
    monkeypatch.setattr(processes, "MAX_LOG", 10)
    lines: list[str] = []

    def check() -> None:
        if len(lines) == 2:
            raise KeyboardInterrupt

    program = Program([sys.executable, "-c", "print('x' * 20); exit(3)"], tmp_path)
    supervisor._keep({"short": program}, check, lines.append)
    assert lines == ["short ended with code 3"] * 2
    assert (tmp_path / "short.log.1").exists()
