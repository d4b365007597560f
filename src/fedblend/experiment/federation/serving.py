# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The long-lived services of a federation: a link, and a node with its warm process.

Each starts its programs, starts them anew when they end, and ends them when it is told
to stop. A node that comes back too early is refused by the link until its old heartbeat
has lapsed, at most a minute; it just tries again.
"""

import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedblend.experiment.federation import members, processes
from fedblend.experiment.federation.settings import Node, Server, load_as

LOOK = 0.5
"""Seconds between two looks at the programs."""


def serve_link(
    settings: Server,
    *,
    ready: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Keep the link running, and tell it the nodes' keys once it answers."""
    processes.connect(settings)
    told = False

    def greet() -> None:
        nonlocal told
        if not told and answers(settings):
            members.register(settings)
            told = True
            ready()

    command = processes.link_command(settings)
    _keep({"link": lambda: command}, settings.folder, greet, say)


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
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Keep a node and its warm process running.

    Args:
        settings: those in ``path``.
        path: of node.toml.
        say: told when a program had to be started anew.
    """
    port = processes.free_port()
    node = processes.node_command(settings, path, port)
    warm = [sys.executable, "-m", "fedblend.cli", "federation", "door", str(path)]
    commands = {"door": lambda: warm, "node": lambda: node}
    _keep(commands, settings.folder, lambda: None, say)


def _keep(
    commands: Mapping[str, Callable[[], Sequence[str]]],
    folder: Path,
    look: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Run programs until told to stop; each is started anew when it ends."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    running, due = {}, dict.fromkeys(commands, 0.0)
    with processes.ended_by_signals():
        try:
            while True:
                for name, command in commands.items():
                    process = running.get(name)
                    if process is not None and process.poll() is not None:
                        processes.stop(process, 1.0)
                        say(f"{name} ended with code {process.returncode}")
                        due[name] = time.monotonic() + processes.AGAIN
                        running.pop(name)
                    if name not in running and time.monotonic() >= due[name]:
                        log = folder / f"{name}.log"
                        running[name] = processes.start(command(), folder, log)
                look()
                time.sleep(LOOK)
        except KeyboardInterrupt:
            return
        finally:
            for process in running.values():
                processes.stop(process)


def serve_door(path: Path) -> None:
    """The warm process of a node: answers letters with everything loaded."""
    from fedblend.experiment.federation.taking_part import node_at
    from fedblend.runtime.flower import warm

    node = node_at(path)
    settings = load_as(Node, path)
    with processes.ended_by_signals():
        try:
            warm.serve(
                processes.door(settings), node.answer, longest=node.rules.longest
            )
        except KeyboardInterrupt:
            return
