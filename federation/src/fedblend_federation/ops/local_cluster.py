# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A whole federation on one machine, and the demonstration that runs on it.

Keys, TLS and processes are real. Nodes reach the link itself, without a proxy: on
loopback no other machine can.

In the demonstration, handwritten digits are dealt to forty clients, four classes each;
the nodes are the first four of them, and half of the digits are held out. APFL runs,
then FLIX.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.config import Config, loads
from fedblend.data.datasets import load
from fedblend.data.partition import classes_per_client
from fedblend.errors import RunError
from fedblend_federation.flower import processes
from fedblend_federation.ops import experiments, registration
from fedblend_federation.ops.credentials import template
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
    supernodes: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[LocalCluster]:
    """A link and its nodes, up until the end of the block, whatever ends it.

    Args:
        folder: of keys, settings and states; must not exist, or be empty.
        rows: of every node, by its name; all nodes host as many clients.
        policy: text of policy.toml for all of them; what init writes if None.
        supernodes: Flower's SuperNodes with its app, in place of our carrier.
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
        with_keys=True,
    )
    settings = load_as(ServerSettings, folder / "server" / "server.toml")
    cluster = LocalCluster(settings, folder)
    for name, own in rows.items():
        write_rows(cluster.home(name), own, policy)
    running: dict[Path, subprocess.Popen] = {}
    with processes.interrupt_on_sigterm():
        try:
            _start(cluster, list(rows), running, supernodes, log)
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
            start(processes.node_command(path, "worker"), node.folder, "worker")
            port = processes.free_port()
            supernode = processes.supernode_command(node, port)
            start(supernode, node.flower_folder, "node")
        else:
            start(processes.node_command(path), node.folder, "node")
    processes.wait_until(all_online, START_TIMEOUT, "the nodes", every=1.0)
    log(f"{len(names)} nodes are connected, each a process of its own")


def _alive(running: dict[Path, subprocess.Popen]) -> bool:
    for output, process in running.items():
        if process.poll() is not None:
            lines = output.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            raise RunError(
                f"the process {output.stem} ended at once: {last.strip()[:300]} "
                f"(all that it said: {output})"
            )
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
        processes.wait_until(lambda: not _kill_rest(folder), END_TIMEOUT, what)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_rest(folder: Path) -> list[int]:
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


NODES = ("alice", "bob", "carol", "dave")
CLIENTS, CLASSES = 40, 4
EXPERIMENTS = ("apfl", "flix")
"""The folders of the experiments; ``templates`` has their configurations."""
POLICY = template("policy.toml").replace("discloses = []", 'discloses = ["own_models"]')
"""That of ``init``, and FLIX's nodes send a model of their own at enrollment."""


def demo(out: Path, show: Callable[[str], Any]) -> None:
    """Run the demonstration; whatever ends it, no process and no key is left.

    Args:
        out: the folder for a folder of results of each experiment; new, or empty.
        show: called with each line of output.

    Raises:
        RunError: results are there already, or something did not come up.
    """
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out}: is not empty; --out names another folder")
    started = time.monotonic()

    def log(line: str) -> None:
        show(f"{time.monotonic() - started:5.0f} s  {line}")

    show(f"Four nodes hold handwritten digits of {CLASSES} classes each.")
    with (
        processes.interrupt_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="fedblend-demo-") as folder,
        local_cluster(
            Path(folder) / "federation", demo_rows(), policy=POLICY, log=log
        ) as cluster,
    ):
        for name in EXPERIMENTS:
            log(f"{name} begins")
            place, config = out / name, demo_config(name)
            experiments.open_folder(place, config, cluster.settings, resume=False)
            experiments.run_experiment(cluster.settings, place, log=log)
    for name in EXPERIMENTS:
        show("\n".join(["", *experiments.status_lines(out / name)]))
    show(
        f"\nWith two dozen digits a node, a few percent mean little. In {out}: "
        f"{', '.join(EXPERIMENTS)}, each with summary.json and tables."
    )


def demo_config(name: str) -> Config:
    """The configuration of an experiment of the demonstration."""
    return loads(template(f"demo_{name}.toml"), "demo")


def demo_rows() -> dict[str, Rows]:
    """The rows of the demonstration's nodes."""
    inputs, targets = load("digits").rows
    parts = classes_per_client(targets, CLIENTS, CLASSES).rows
    return {
        name: {"inputs": inputs[part], "targets": targets[part]}
        for name, part in zip(NODES, parts, strict=False)
    }
