# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The long-lived services of a federation: the link, a node, and a node's worker.

Each starts its programs, restarts them when they end, and ends them when it is stopped.
"""

import grp
import os
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedblend.errors import RunError
from fedblend_federation import worker
from fedblend_federation.flower import processes
from fedblend_federation.ops import registration
from fedblend_federation.ops.audit import Audit
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as

INTERVAL = 0.5
"""Seconds between two checks of the programs."""


class Program(NamedTuple):
    """A program that is kept running, and the folder of its state and log."""

    command: Sequence[str]
    folder: Path


def serve_link(
    settings: ServerSettings,
    *,
    ready: Callable[[], None] = lambda: None,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Keep the link running, and register the nodes' keys once it is up."""
    processes.connect(settings)
    registered = False

    def register() -> None:
        nonlocal registered
        if not registered and is_up(settings):
            registration.register(settings)
            registered = True
            ready()

    link = Program(processes.link_command(settings), settings.folder)
    _keep({"link": link}, register, log)


def is_up(settings: ServerSettings) -> bool:
    """Whether the link is up."""
    url = f"https://{settings.link}/health"
    try:
        trusted = ssl.create_default_context(cafile=str(settings.ca))
        with urllib.request.urlopen(url, timeout=2, context=trusted) as response:
            return response.status == 200
    except OSError:
        return False


def serve_node(
    settings: NodeSettings,
    path: Path,
    *,
    flower_only: bool = False,
    supernode: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Keep a node running: one process with the carrier and the rows.

    Args:
        settings: those in ``path``.
        path: of node.toml.
        flower_only: the half that has the network, which then needs nothing but the
            socket; another user runs the worker. The carrier is then this process.
        supernode: Flower's SuperNode and its app in place of the carrier.
        log: called with a line when a program had to be restarted.
    """
    if not (supernode or settings.supernode):
        if flower_only:
            return serve_carrier(settings, with_rows=False, log=log)
        node = Program(processes.node_command(path), settings.folder)
        return _keep({"node": node}, lambda: None, log)
    port = processes.free_port()
    fallback = None if flower_only else path
    command = processes.supernode_command(settings, port, fallback)
    programs = {"node": Program(command, settings.flower_folder)}
    if not flower_only:
        own = Program(processes.worker_command(path), settings.folder)
        programs = {"worker": own, **programs}
    return _keep(programs, lambda: None, log)


def serve_carrier(
    settings: NodeSettings,
    *,
    with_rows: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Carry messages in this process, to the node in it or to the worker.

    Args:
        settings: of the node.
        with_rows: this process has the rows; else the worker has them.
        log: called with a line when the connection changes.
    """
    os.environ.update(processes.SILENCE)
    # Here and not above: only a process that connects imports Flower.
    from fedblend_federation.flower.clients import FleetClient
    from fedblend_federation.flower.supernode import Carrier

    folder = settings.folder if with_rows else settings.flower_folder
    fleet = FleetClient(str(settings.server), settings.ca, settings.key, log)
    if with_rows:
        from fedblend_federation.client.node import answering

        node = answering(settings)
        handler, note = node.handler, node.note
    else:
        forward = worker.Handler(partial(worker.request, settings.worker_socket))
        handler, note = lambda: forward, Audit(folder / "audit.jsonl").note
    with processes.interrupt_on_sigterm():
        try:
            Carrier(fleet, folder, handler, note, log).run()
        except KeyboardInterrupt:
            return


def _keep(
    programs: Mapping[str, Program],
    check: Callable[[], None],
    log: Callable[[str], None],
) -> None:
    """Run programs until interrupted; each is restarted when it ends."""
    running: dict[str, subprocess.Popen] = {}
    due = dict.fromkeys(programs, 0.0)
    with processes.interrupt_on_sigterm():
        try:
            while True:
                for name, (command, folder) in programs.items():
                    process = running.get(name)
                    if process is not None and process.poll() is not None:
                        processes.stop(process, 1.0)
                        log(f"{name} ended with code {process.returncode}")
                        due[name] = time.monotonic() + processes.RESTART_AFTER
                        running.pop(name)
                    if name not in running and time.monotonic() >= due[name]:
                        output = folder / f"{name}.log"
                        running[name] = processes.start(command, folder, output)
                    processes.rotate(folder / f"{name}.log")
                check()
                time.sleep(INTERVAL)
        except KeyboardInterrupt:
            return
        finally:
            for process in running.values():
                processes.stop(process)


def serve_worker(path: Path, group: str | None = None) -> None:
    """Run the worker of a node: it replies to messages with everything loaded.

    Args:
        path: of node.toml.
        group: users of this group may connect, too; without it only this user may.
    """
    from fedblend_federation.client.node import answering

    settings = load_as(NodeSettings, path)
    socket = settings.worker_socket
    if group is not None and socket.is_relative_to(settings.folder):
        raise RunError(
            f"--group: the socket is in {settings.folder}, which is for one user; "
            f"give {path} a socket in another folder"
        )
    members = None if group is None else _group(group)
    with processes.interrupt_on_sigterm():
        try:
            worker.serve(socket, answering(settings).handler, group=members)
        except KeyboardInterrupt:
            return


def _group(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise RunError(f'--group: "{name}" is no group of this machine') from None
