# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A whole federation on one machine: real keys, TLS and processes, on loopback.

For the demonstration and for tests. Nodes reach the link itself, without a proxy: on
loopback there is nobody else.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedblend.deploy.ops import flwr_processes, registration
from fedblend.deploy.ops.provision import provision
from fedblend.deploy.ops.settings import Node, Server, load_as
from fedblend.deploy.ops.supervisor import answers
from fedblend.errors import RunError

WITHIN = 300.0
"""Seconds within which everything must be up, also on a busy machine."""
GONE = 30.0
"""Seconds within which a killed process must be gone."""

Rows = Mapping[str, np.ndarray]
"""``inputs`` and ``targets``."""


class OneMachine(NamedTuple):
    """A federation that is up."""

    settings: Server
    folder: Path

    def node(self, name: str) -> Node:
        """The settings of a node."""
        return load_as(Node, self.folder / "nodes" / name / "node.toml")


@contextlib.contextmanager
def one_machine(
    folder: Path,
    rows: Mapping[str, Rows],
    *,
    policy: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[OneMachine]:
    """A link and its nodes, up until the end of the block, whatever ends it.

    Args:
        folder: where keys, settings and states go; must not exist, or be empty.
        rows: of every node, by its name.
        policy: text of policy.toml for all of them; what init writes if None.
        say: told what is going on.
    """
    port = flwr_processes.free_port()
    provision(folder, host="127.0.0.1", nodes=list(rows), port=port, link_port=port)
    for name, own in rows.items():
        _furnish(folder / "nodes" / name, own, policy)
    made = OneMachine(load_as(Server, folder / "server" / "server.toml"), folder)
    running: dict[Path, subprocess.Popen] = {}
    with flwr_processes.ended_by_signals():
        try:
            _start(made, list(rows), running, say)
            yield made
        finally:
            _end(list(running.values()), folder)


def _furnish(home: Path, rows: Rows, policy: str | None) -> None:
    np.savez(home / "rows.npz", inputs=rows["inputs"], targets=rows["targets"])
    settings = home / "node.toml"
    settings.write_text(settings.read_text().replace("rows.csv", "rows.npz"))
    if policy is not None:
        (home / "policy.toml").write_text(policy)


def _start(
    made: OneMachine,
    names: list[str],
    running: dict[Path, subprocess.Popen],
    say: Callable[[str], None],
) -> None:
    settings = made.settings

    def start(command: list[str], folder: Path, name: str) -> None:
        log = folder / f"{name}.log"
        running[log] = flwr_processes.start(command, folder, log)

    flwr_processes.connect(settings)
    start(flwr_processes.link_command(settings), settings.folder, "link")
    flwr_processes.wait_until(lambda: _up(running, settings), WITHIN, "the link")
    # The link refuses a node whose key it does not know yet.
    registration.register(settings)
    say(f"a link at {settings.link} that takes the keys of {', '.join(names)}")
    for name in names:
        node, path = made.node(name), made.folder / "nodes" / name / "node.toml"
        warm = [sys.executable, "-m", "fedblend.cli", "federation", "door", str(path)]
        start(warm, node.folder, "door")
        port = flwr_processes.free_port()
        start(flwr_processes.node_command(node, port, path), node.flower, "node")

    def all_there() -> bool:
        there = [member.status for member in registration.members(settings)]
        return _alive(running) and there == ["online"] * len(names)

    flwr_processes.wait_until(all_there, WITHIN, "the nodes", every=1.0)
    say(f"{len(names)} nodes are connected, each a process of its own")


def _up(running: dict[Path, subprocess.Popen], settings: Server) -> bool:
    return _alive(running) and answers(settings)


def _alive(running: dict[Path, subprocess.Popen]) -> bool:
    for log, process in running.items():
        if process.poll() is not None:
            words = log.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(words) if line.strip()), "no word")
            raise RunError(f"{log.stem}: ended at once: {last.strip()[:300]}")
    return True


def _end(running: list[subprocess.Popen], folder: Path) -> None:
    """End everything; a second Ctrl-C does not keep it from being done."""
    before = {
        sign: signal.signal(sign, signal.SIG_IGN)
        for sign in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            flwr_processes.stop(process)
        # Flower's own children have sessions of their own.
        flwr_processes.wait_until(
            lambda: not _killed(folder), GONE, "the end of it all"
        )
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _killed(folder: Path) -> list[int]:
    """Kill what is still there; the answer are those that were."""
    found = processes_of(folder)
    for number in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return found


def processes_of(folder: Path) -> list[int]:
    """The processes whose environment says that their state is below a folder."""
    mark = f"FLWR_HOME={folder.absolute()}/".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return [number for number in found if number != os.getpid()]
