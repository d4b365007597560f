# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Services on this machine: the link, whom it serves and knows; a node's worker."""

from collections.abc import Iterator
from pathlib import Path

from fedblend.errors import RunError
from fedblend_federation import worker
from fedblend_federation.ops import flwr_processes
from fedblend_federation.ops.doctor.probes import Finding, owner
from fedblend_federation.ops.port_guard import is_open
from fedblend_federation.ops.registration import unregistered
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, is_loopback
from fedblend_federation.ops.supervisor import is_up

WORKER_ANSWERS = 10.0
"""Seconds within which a worker answers that is not computing."""


def link_service(settings: ServerSettings) -> Iterator[Finding]:
    """Whether the link is up, serves nobody else here, and knows the nodes' keys."""
    where = str(settings.link)
    if not is_up(settings):
        advice = "start it: systemctl start fedblend-link"
        yield Finding("the link is not up", where, "no answer", advice, fault=False)
        return
    if is_loopback(settings.link.host) and is_open(settings.link, settings.ca):
        yield Finding(
            "is open to every user of this machine",
            f"https://{settings.link}/v1/control/",
            "calls that start runs are answered",
            "start the link with fedblend federation server",
        )
    try:
        flwr_processes.connect(settings)
        strangers = unregistered(settings)
    except RunError as error:
        advice = f"run the doctor as {owner(settings.folder)} or root"
        what = "the link was not asked for its keys"
        yield Finding(what, where, str(error), advice, fault=False)
        return
    for node in strangers:
        what, value = f"the link does not know {node.name}", "another key, or none"
        advice = "restart the link: systemctl restart fedblend-link"
        yield Finding(what, str(node.key), value, advice)


def worker_service(settings: NodeSettings) -> Iterator[Finding]:
    """Whether the worker answers; a node of one process has none."""
    socket = settings.worker_socket
    there = socket.exists()
    try:
        worker.request(socket, b"", WORKER_ANSWERS)
    except worker.SocketError as error:
        why = error.__context__
    else:
        return
    if isinstance(why, PermissionError):
        raise PermissionError(why.errno, why.strerror, str(socket))
    if _is_one_process(settings):
        return
    if isinstance(why, TimeoutError):
        value, advice = f"not in {WORKER_ANSWERS:g} s", "it may be computing; try again"
        what = "the worker does not answer"
        yield Finding(what, str(socket), value, advice, fault=False)
        return
    what = "the worker does not answer" if there else "no worker is there"
    value = why.strerror if isinstance(why, OSError) else None
    advice = "start it: systemctl restart fedblend-worker"
    yield Finding(what, str(socket), value or str(why), advice, fault=there)


def _is_one_process(settings: NodeSettings) -> bool:
    """Whether the node was started as one process, which has the rows itself."""
    return settings.flower is not None and _ran(settings.folder) > _ran(settings.flower)


def _ran(folder: Path) -> float:
    """When a carrier was started in a folder last."""
    lock = folder / "carrier.lock"
    return lock.stat().st_mtime if lock.exists() else 0.0
