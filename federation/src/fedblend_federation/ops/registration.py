# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The nodes as the link knows them: the registered keys, and who is connected.

The link gives a node an id when its key is registered, and does not return names. So
``members.json`` keeps the ids beside the link's database.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from fedblend.errors import RunError
from fedblend.runs import run_folder
from fedblend_federation.flower.processes import SILENCE
from fedblend_federation.ops.settings import NodeEntry, ServerSettings
from fedblend_federation.server.checkpoint import Nodes
from fedblend_federation.server.membership import Registered

if TYPE_CHECKING:
    from fedblend_federation.flower.private import Control

UNKNOWN = "unknown"


class Member(NamedTuple):
    """A node, and its status: "online", "offline", "registered", "retired" or
    "unknown".
    """

    name: str
    clients: tuple[int, ...]
    status: str


def register(settings: ServerSettings) -> None:
    """Register the keys of all nodes at the link, and unregister those that went.

    A key that the link knows stays; a key that replaces another takes its place.
    """
    path, active = settings.folder / "members.json", _active(settings)
    with connect(settings) as link:
        there, wanted = link.statuses(), {node.name: _digest(node) for node in active}
        known = {
            name: member
            for name, member in _read_members(settings).items()
            if member["node"] in there and wanted.get(name) == member["key"]
        }
        # The link does not say whose key an id has: all ids that are not known go.
        ours = {member["node"] for member in known.values()}
        for id in sorted(there.keys() - ours):
            link.unregister(id)
        run_folder.write_text(path, run_folder.json_text(known))
        for node in active:
            if node.name not in known:
                id = link.register(node.key, node.name)
                known[node.name] = {"key": wanted[node.name], "node": id}
                run_folder.write_text(path, run_folder.json_text(known))


def _active(settings: ServerSettings) -> list[NodeEntry]:
    return [node for node in settings.nodes if not node.retired]


def link_nodes(settings: ServerSettings) -> Nodes:
    """The nodes by the ids that the link gave to their keys, if ``register`` ran."""
    known = _read_members(settings)
    by_id = {
        int(known[node.name]["node"]): Registered(node.name, node.client_ids)
        for node in _active(settings)
        if node.name in known
    }
    gone = tuple(c for node in settings.nodes if node.retired for c in node.client_ids)
    return Nodes(by_id or None, gone)


def members(settings: ServerSettings) -> list[Member]:
    """The nodes of a federation, in the order of their first client ids."""
    known, there = _read_members(settings), _statuses(settings)
    return [
        Member(
            node.name,
            node.client_ids,
            "retired"
            if node.retired
            else there.get(known.get(node.name, {}).get("node", ""), UNKNOWN),
        )
        for node in sorted(settings.nodes, key=lambda node: min(node.client_ids))
    ]


def unknown_nodes(settings: ServerSettings) -> list[NodeEntry]:
    """The nodes whose keys, as they are in the files, the link does not know."""
    known, there = _read_members(settings), _statuses(settings)
    return [
        node
        for node in _active(settings)
        if known.get(node.name, {}).get("node") not in there
        or known[node.name]["key"] != _digest(node)
    ]


def _statuses(settings: ServerSettings) -> dict[str, str]:
    with connect(settings) as link:
        return link.statuses()


@contextmanager
def connect(settings: ServerSettings) -> "Iterator[Control]":
    """One connection to the link, for as many calls as are needed."""
    os.environ.update(SILENCE)
    # Here and not above: only a process that connects imports Flower.
    from fedblend_federation.flower.private import Control

    with closing(Control(str(settings.link), settings.ca)) as link:
        yield link


def _read_members(settings: ServerSettings) -> dict[str, Any]:
    path = settings.folder / "members.json"
    return run_folder.read_json(path) if path.exists() else {}


def _digest(node: NodeEntry) -> str:
    try:
        return hashlib.sha256(node.key.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(
            f"{node.key}: {error.strerror}; fedblend federation roster writes it, from "
            "public.toml of the node"
        ) from None
