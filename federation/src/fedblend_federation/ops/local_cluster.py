# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A whole federation on one machine: real keys, TLS and processes, on loopback.

For the demonstration and for tests. Nodes reach the link itself, without a proxy: on
loopback no other machine can.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedblend.errors import RunError
from fedblend_federation.flower import processes
from fedblend_federation.ops import registration
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as
from fedblend_federation.ops.supervisor import is_up

START_TIMEOUT = 300.0
"""Seconds within which everything must be up, also on a busy machine."""
END_TIMEOUT = 30.0
"""Seconds within which a killed process must be gone."""

Rows = Mapping[str, np.ndarray]
"""``inputs`` and ``targets``."""
Hosted = Rows | Sequence[Rows]
"""The rows of a node, or those of each client that it hosts."""


class LocalCluster(NamedTuple):
    """A federation that is up."""

    settings: ServerSettings
    folder: Path

    def home(self, name: str) -> Path:
        """The folder of a node."""
        return self.folder / "nodes" / name

    def node(self, name: str) -> NodeSettings:
        """The settings of a node."""
        return load_as(NodeSettings, self.home(name) / "node.toml")


@contextlib.contextmanager
def local_cluster(
    folder: Path,
    rows: Mapping[str, Hosted],
    *,
    policy: str | None = None,
    base: Path | None = None,
    supernodes: bool = False,
    command: Callable[[Path], list[str]] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[LocalCluster]:
    """A link and its nodes, up until the end of the block, whatever ends it.

    Args:
        folder: of keys, settings and states; must not exist, or be empty.
        rows: of every node, by its name; all nodes host as many clients.
        policy: text of policy.toml for all of them; what init writes if None.
        base: a frozen base for adapters, which all of them get.
        supernodes: Flower's SuperNodes with its app, in place of our carrier.
        command: from the path of node.toml to another program of a node.
        log: called with a line of progress.
    """
    port = processes.free_port()
    first = next(iter(rows.values()))
    provision(
        folder,
        host="127.0.0.1",
        nodes=list(rows),
        port=port,
        link_port=port,
        clients_per_node=1 if isinstance(first, Mapping) else len(first),
        base=base,
        with_keys=True,
    )
    settings = load_as(ServerSettings, folder / "server" / "server.toml")
    cluster = LocalCluster(settings, folder)
    for name, own in rows.items():
        write_rows(cluster.home(name), own, policy)
    running: dict[Path, subprocess.Popen] = {}
    with processes.interrupted_by_sigterm():
        try:
            own = command or processes.node_command
            _start(cluster, list(rows), running, supernodes, own, log)
            yield cluster
        finally:
            _end(list(running.values()), folder)


def write_rows(home: Path, rows: Hosted, policy: str | None) -> None:
    """Give a node its rows, and a policy if it is not the default one."""
    settings = home / "node.toml"
    settings.write_text(settings.read_text().replace('.csv"', '.npz"'))
    node = load_as(NodeSettings, settings)
    several = [rows] if isinstance(rows, Mapping) else rows
    (home / "rows").mkdir(mode=0o700, exist_ok=True)
    for own, held in zip(node.client_settings().values(), several, strict=True):
        np.savez(own.data.file, inputs=held["inputs"], targets=held["targets"])
        own.data.file.chmod(0o600)
    if policy is not None:
        (home / "policy.toml").write_text(policy)


def _start(
    cluster: LocalCluster,
    names: list[str],
    running: dict[Path, subprocess.Popen],
    supernodes: bool,
    command: Callable[[Path], list[str]],
    log: Callable[[str], None],
) -> None:
    settings = cluster.settings

    def start(program: list[str], folder: Path, name: str) -> None:
        output = folder / f"{name}.log"
        running[output] = processes.start(program, folder, output)

    def link_is_up() -> bool:
        return _alive(running) and is_up(settings)

    def all_online() -> bool:
        found = [member.status for member in registration.members(settings)]
        return _alive(running) and found == ["online"] * len(names)

    processes.connect(settings)
    start(processes.link_command(settings), settings.folder, "link")
    processes.wait_until(link_is_up, START_TIMEOUT, "the link")
    # The link refuses a node whose key it does not know yet.
    registration.register(settings)
    log(f"a link at {settings.link} with the keys of {', '.join(names)}")
    for name in names:
        node, path = cluster.node(name), cluster.home(name) / "node.toml"
        if supernodes:
            start(processes.worker_command(path), node.folder, "worker")
            port = processes.free_port()
            supernode = processes.supernode_command(node, port, path)
            start(supernode, node.flower_folder, "node")
        else:
            start(command(path), node.folder, "node")
    processes.wait_until(all_online, START_TIMEOUT, "the nodes", every=1.0)
    log(f"{len(names)} nodes are connected, each a process of its own")


def _alive(running: dict[Path, subprocess.Popen]) -> bool:
    for output, process in running.items():
        if process.poll() is not None:
            lines = output.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            raise RunError(f"{output.stem}: ended at once: {last.strip()[:300]}")
    return True


def _end(running: list[subprocess.Popen], folder: Path) -> None:
    """End everything; a second Ctrl-C does not interrupt it."""
    before = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            processes.stop(process)
        # Flower's own children have sessions of their own.
        what = "the end of all processes"
        processes.wait_until(lambda: not _killed(folder), END_TIMEOUT, what)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _killed(folder: Path) -> list[int]:
    """Kill the processes that are still there; returns their ids."""
    found = processes_of(folder)
    for number in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return found


def processes_of(folder: Path) -> list[int]:
    """The processes whose environment says that their state is below a folder."""
    variable = f"FLWR_HOME={folder.absolute()}/".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return [number for number in found if number != os.getpid()]
