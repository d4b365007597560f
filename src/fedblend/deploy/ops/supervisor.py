# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The long-lived services of a federation: a link, and a node with its warm process.

Each starts its programs, starts them anew when they end, and ends them when it is told
to stop. A node that comes back too early is refused by the link until its old heartbeat
has lapsed, at most a minute; it just tries again.
"""

import grp
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedblend.deploy.ops import flwr_processes, registration
from fedblend.deploy.ops.settings import Node, Server, load_as
from fedblend.errors import RunError

LOOK = 0.5
"""Seconds between two looks at the programs."""


class Kept(NamedTuple):
    """A program that is kept running, and the folder of its state and words."""

    command: Sequence[str]
    folder: Path


def serve_link(
    settings: Server,
    *,
    ready: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Keep the link running, and tell it the nodes' keys once it answers."""
    flwr_processes.connect(settings)
    told = False

    def greet() -> None:
        nonlocal told
        if not told and answers(settings):
            registration.register(settings)
            told = True
            ready()

    link = Kept(flwr_processes.link_command(settings), settings.folder)
    _keep({"link": link}, greet, say)


def answers(settings: Server) -> bool:
    """Whether the link answers."""
    trusted = ssl.create_default_context(cafile=str(settings.ca))
    url = f"https://{settings.link}/health"
    try:
        with urllib.request.urlopen(url, timeout=2, context=trusted) as reply:
            return reply.status == 200
    except OSError:
        return False


def serve_node(
    settings: Node,
    path: Path,
    *,
    carrier_only: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Keep a node and its warm process running.

    Args:
        settings: those in ``path``.
        path: of node.toml.
        carrier_only: Flower's half alone, which then needs nothing but the socket;
            another user keeps the process behind it.
        say: told when a program had to be started anew.
    """
    port = flwr_processes.free_port()
    if carrier_only:
        node = flwr_processes.node_command(settings, port)
        _keep({"node": Kept(node, settings.flower)}, lambda: None, say)
        return
    warm = [sys.executable, "-m", "fedblend.cli", "federation", "door", str(path)]
    node = flwr_processes.node_command(settings, port, path)
    programs = {
        "door": Kept(warm, settings.folder),
        "node": Kept(node, settings.flower),
    }
    _keep(programs, lambda: None, say)


def _keep(
    programs: Mapping[str, Kept],
    look: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Run programs until told to stop; each is started anew when it ends."""
    running, due = {}, dict.fromkeys(programs, 0.0)
    with flwr_processes.ended_by_signals():
        try:
            while True:
                for name, (command, folder) in programs.items():
                    process = running.get(name)
                    if process is not None and process.poll() is not None:
                        flwr_processes.stop(process, 1.0)
                        say(f"{name} ended with code {process.returncode}")
                        due[name] = time.monotonic() + flwr_processes.AGAIN
                        running.pop(name)
                    if name not in running and time.monotonic() >= due[name]:
                        log = folder / f"{name}.log"
                        running[name] = flwr_processes.start(command, folder, log)
                look()
                time.sleep(LOOK)
        except KeyboardInterrupt:
            return
        finally:
            for process in running.values():
                flwr_processes.stop(process)


def serve_door(path: Path, group: str | None = None) -> None:
    """The warm process of a node: answers messages with everything loaded.

    Args:
        path: of node.toml.
        group: users of which may hand messages in; without it only this one may.
    """
    from fedblend.deploy import worker
    from fedblend.deploy.client.node import Refusal
    from fedblend.deploy.client.policy import Accept
    from fedblend.deploy.client.setup import node_at

    settings = load_as(Node, path)
    if group is not None and settings.socket.is_relative_to(settings.folder):
        raise RunError(
            f"--group: the socket is in {settings.folder}, which is for one user; "
            f"give {path} a door of its own"
        )
    node = node_at(path)

    def longest() -> int | None:
        try:
            return node.rules.longest()
        except Refusal:
            # With a policy that cannot be read all messages are refused, not unheard.
            return Accept().max_message_bytes

    with flwr_processes.ended_by_signals():
        try:
            worker.serve(
                settings.socket,
                node.answer,
                longest=longest,
                group=None if group is None else _group(group),
            )
        except KeyboardInterrupt:
            return


def _group(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise RunError(f'--group: "{name}" is no group of this machine') from None
