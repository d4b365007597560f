# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The nodes as the link knows them: whose keys it takes, and who is there.

The link calls a node by a number that it draws when the key is registered, and tells
names to nobody. So the numbers are kept beside its database.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.deploy.ops.flwr_processes import CONNECTION, call
from fedblend.deploy.ops.settings import NodeEntry, Server
from fedblend.errors import RunError
from fedblend.experiments import run_folder

REGISTERED = "already in use"
"""What the link says to a key that it knows."""
UNKNOWN = "unknown"


class Member(NamedTuple):
    """A node, and what the link says of it: "online", "offline", "registered"."""

    name: str
    client: int
    status: str


def register(settings: Server) -> None:
    """Tell the link the keys of the nodes, and to forget those that went.

    A key that it knows already stays; one that replaces another takes its place.
    """
    path = _place(settings)
    known, there = _known(path), _statuses(settings)
    wanted = {node.name: _digest(node) for node in settings.nodes}
    for name, member in list(known.items()):
        if member["node"] in there and wanted.get(name) == member["key"]:
            continue
        if member["node"] in there:
            call(settings, "supernode", "unregister", member["node"], CONNECTION)
        del known[name]
    for node in settings.nodes:
        if node.name not in known:
            known[node.name] = {
                "key": wanted[node.name],
                "node": _number(settings, node),
            }
            run_folder.write_text(path, run_folder.as_json(known))
    run_folder.write_text(path, run_folder.as_json(known))


def members(settings: Server) -> list[Member]:
    """The nodes of a federation, in the order of client ids."""
    known, there = _known(_place(settings)), _statuses(settings)
    return [
        Member(
            node.name,
            node.client,
            there.get(known.get(node.name, {}).get("node", ""), UNKNOWN),
        )
        for node in sorted(settings.nodes, key=lambda node: node.client)
    ]


def _number(settings: Server, node: NodeEntry) -> str:
    """Register a key; the link's number for it, empty if it was known before."""
    try:
        said = call(
            settings,
            "supernode",
            "register",
            str(node.key),
            CONNECTION,
            "--name",
            node.name,
        )
    except RunError as error:
        if REGISTERED not in str(error):
            raise
        return ""
    return str(said["node-id"])


def _statuses(settings: Server) -> dict[str, str]:
    said = call(settings, "supernode", "list", CONNECTION)
    return {str(one["node-id"]): str(one["status"]) for one in said.get("nodes", [])}


def _place(settings: Server) -> Path:
    return settings.folder / "members.json"


def _known(path: Path) -> dict[str, Any]:
    return run_folder.read_json(path) if path.exists() else {}


def _digest(node: NodeEntry) -> str:
    try:
        return hashlib.sha256(node.key.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(f"{node.key}: {error.strerror}") from None
