# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The long-lived services of a federation: the link, a node, and a node's worker.

Each runs until it is interrupted, or until its program ends: systemd starts it again.
"""

import grp
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from fedblend.errors import RunError
from fedblend_federation import worker
from fedblend_federation.flower import processes
from fedblend_federation.flower.port_guard import status_of
from fedblend_federation.ops import registration
from fedblend_federation.ops.audit import Audit
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as

INTERVAL = 0.5
"""Seconds between two looks at the link."""


def serve_link(
    settings: ServerSettings, ready: Callable[[], None] = lambda: None
) -> None:
    """Run the link, and register the nodes' keys once it is up.

    Raises:
        RunError: the link ended by itself.
    """
    processes.connect(settings)
    output, registered = settings.folder / "link.log", False
    link = processes.start(processes.link_command(settings), settings.folder, output)
    with processes.interrupt_on_sigterm():
        try:
            while link.poll() is None:
                if not registered and is_up(settings):
                    registration.register(settings)
                    registered = True
                    ready()
                processes.rotate(output)
                time.sleep(INTERVAL)
        except KeyboardInterrupt:
            return
        finally:
            processes.stop(link)
    raise RunError(f"the link ended with code {link.returncode}; see {output}")


def is_up(settings: ServerSettings) -> bool:
    """Whether the link is up."""
    return status_of(settings.link, settings.ca, "/health") == 200


def serve_supernode(settings: NodeSettings) -> NoReturn:
    """Become Flower's SuperNode, which runs its app in place of the carrier.

    It needs the worker, which is a service of its own.
    """
    folder = settings.flower_folder
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = processes.supernode_command(settings, processes.free_port())
    os.execve(command[0], command, processes.variables(folder))


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
    from fedblend_federation.flower.link_clients import FleetClient
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
        raise RunError(
            f'--group: "{name}" is not a group of users on this machine'
        ) from None
