# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node that hosts several clients, as the gateway of many devices does.

Each client has its own rows, states, ledger, audit and limits, and answers for itself:
what one of them refuses, or fails at, is no matter of the others. They share the
process, the key and the connection, and what is compiled. Requests come in bundles, and
are answered one after the other.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from fedblend.simulation.io.serialize import WireError
from fedblend_federation import bundle
from fedblend_federation import message as messages
from fedblend_federation.client.admission import node_of
from fedblend_federation.client.node import Node
from fedblend_federation.client.shared_builds import SharedBuilds
from fedblend_federation.message import UNKNOWN, UNREADABLE, Message, encode, one_line
from fedblend_federation.ops.audit import Audit
from fedblend_federation.ops.settings import NodeSettings, listed, load_as
from fedblend_federation.worker import Handler


class Host:
    """Replies to messages and bundles, for the clients that it hosts.

    Args:
        nodes: of the clients.
        note: writes to the audit of the node itself: what is to no client.
    """

    def __init__(self, nodes: Mapping[int, Node], note: Callable[..., str]):
        self.nodes, self.note = nodes, note

    def handler(self) -> Handler:
        """What replies to the next message, with the policies as they are now."""
        handlers = {client: node.handler() for client, node in self.nodes.items()}
        # A bundle is no longer than what the strictest of its clients accepts.
        rooms = [one.max_bytes for one in handlers.values()]
        room = min((most for most in rooms if most is not None), default=None)
        return Handler(partial(self._reply, handlers, room), room)

    def reply(self, data: bytes) -> bytes:
        """The reply to a message, or the bundle of replies to a bundle."""
        return self.handler().reply(data)

    def _reply(
        self, handlers: Mapping[int, Handler], room: int | None, data: bytes
    ) -> bytes:
        try:
            if bundle.is_bundle(data):
                return self._replies(handlers, bundle.unpack_bundle(data))
            request = messages.decode(data, room)
            if request.kind == "describe" and request.client == UNKNOWN:
                return self._describe(handlers, room, request)
            if request.client not in handlers:
                raise WireError(
                    f"client: a message to client {request.client}, this node hosts "
                    f"{listed(list(handlers))}"
                )
        except WireError as error:
            return self._refuse(str(error))
        return handlers[request.client].reply(data)

    def _replies(
        self, handlers: Mapping[int, Handler], requests: Iterable[tuple[int, bytes]]
    ) -> bytes:
        """One reply after the other; what is to others than its clients is left out."""
        replies = []
        for client, data in requests:
            if client in handlers:
                replies.append((client, handlers[client].reply(data)))
            else:
                self.note("refused", message="foreign", reason=f"to client {client}")
        return bundle.pack_bundle(replies)

    def _describe(
        self, handlers: Mapping[int, Handler], room: int | None, request: Message
    ) -> bytes:
        """What all clients describe, and the size of bundles that they accept."""
        replies = []
        for client, handler in handlers.items():
            own = messages.decode(
                handler.reply(encode(request._replace(client=client)))
            )
            if own.kind == "describe":
                most = bundle.LARGEST if room is None else room
                own = own._replace(fields={**own.fields, "bundle_bytes": most})
            replies.append((client, encode(own)))
        return bundle.pack_bundle(replies)

    def _refuse(self, reason: str) -> bytes:
        line = one_line(reason)
        self.note("refused", message="foreign", reason=line)
        first = min(self.nodes)
        return encode(Message("refused", UNREADABLE, first, fields={"reason": line}))


def answering(settings: NodeSettings) -> Node | Host:
    """What answers for a node: its one client, or the host of several."""
    shared = SharedBuilds(settings.bases)
    nodes = {
        client: node_of(own, shared)
        for client, own in settings.client_settings().items()
    }
    if settings.client is not None:
        return nodes[settings.client]
    return Host(nodes, Audit(settings.folder / "audit.jsonl").note)


def answering_at(path: Path) -> Node | Host:
    """What answers for the node whose node.toml this is."""
    return answering(load_as(NodeSettings, path))
