# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's private packages, behind a few functions: no other module imports them.

Flower's public interface has no connection of a node but the SuperNode, which fetches
an app from the server and runs it, and no Grid that hands out replies one by one. Both
are made here of Flower's own clients and messages. ``tests/test_private_flower.py``
takes a message through all of it, with whatever version of Flower is installed.

A message at the link is a head and a tree of parts, each stored and fetched by its own
call. Where nothing else is said, the errors of a call are those of ``httpx``, or a
``ValueError``.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedblend.errors import RunError
from fedblend_federation.message import one_line
from fedblend_federation.ops.key_files import certificate, public_node_key

Tree = ObjectTree
"""The parts of a message, by their ids: the message, its records, their pieces."""


class MessageParts(NamedTuple):
    """A message in parts."""

    head: Any
    tree: Tree
    contents: Mapping[str, InflatableObject]


def take_apart(message: Message) -> MessageParts:
    """The parts of a message, which gets its id here."""
    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        contents, tree = get_all_nested_objects(message), get_object_tree(message)
        head = message_to_proto(remove_content_from_message(message))
    return MessageParts(head, tree, contents)


def list_needed_parts(tree: Tree) -> list[str]:
    """The parts of a message without which its content is not known.

    Of a message in one piece only that piece is needed: around it are a record of
    records and Flower's message, a call of HTTP each.
    """
    leaf, depth = tree, 0
    while len(leaf.children) == 1:
        leaf, depth = leaf.children[0], depth + 1
    if depth == 2 and not leaf.children:
        return [leaf.object_id]
    return [branch.object_id for branch in iterate_object_tree(tree)]


def put_together(parts: Mapping[str, bytes], tree: Tree) -> Any:
    """A message, or the only part of it that was needed."""
    top = tree.object_id if tree.object_id in parts else next(iter(parts))
    return inflate_object_from_contents(top, dict(parts))


class Stored(NamedTuple):
    """The parts of the messages of a run at the link, for a node or a server."""

    client: Any
    node: Node
    run: int

    def pull(self, id: str) -> tuple[bool, bytes | None]:
        """Whether the link knows a part, and its bytes if they have arrived there."""
        request = PullObjectRequest(node=self.node, run_id=self.run, object_id=id)
        found = self.client.PullObject(request)
        known = found.object_found
        return known, found.object_content if found.object_available else None

    def push(self, id: str, part: InflatableObject, session: str) -> None:
        """Store a part that the link asked for in a session."""
        request = PushObjectRequest(
            node=self.node,
            run_id=self.run,
            object_id=id,
            object_content=part.deflate(),
            session_id=session,
        )
        self.client.PushObject(request)

    def confirm(self, message: str) -> None:
        """Tell the link that a message has been read."""
        request = ConfirmMessageReceivedRequest(
            node=self.node, run_id=self.run, message_object_id=message
        )
        self.client.ConfirmMessageReceived(request)


class Asked(NamedTuple):
    """What the link answers to messages: their ids, and the parts that it wants."""

    messages: Sequence[str]
    parts: Iterable[str]
    session: str


class Fleet:
    """The calls of a node to the link; the one that hands out an app is not among them.

    Args:
        address: host and port of the link, or of the proxy before it.
        ca: file of the only authority that is trusted.
        key: the node's own.
        check: called with every response before it is read.
    """

    def __init__(
        self, address: str, ca: Path, key: ec.EllipticCurvePrivateKey, check: Any
    ):
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ]
        self.client = FleetHttpClient.from_server_address(
            address, False, _authority(ca), interceptors
        )
        connection: httpx.Client = self.client._client
        connection.follow_redirects = False
        connection.headers["accept-encoding"] = "identity"
        connection.event_hooks = {"response": [check]}
        self._public, self._node = public_key_to_bytes(key.public_key()), Node()

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def activate(self, interval: float) -> int:
        """Say that the node is there, and how often it says so; the link's id of it."""
        request = ActivateNodeRequest(
            public_key=self._public, heartbeat_interval=interval
        )
        self._node = Node(node_id=self.client.ActivateNode(request).node_id)
        return self._node.node_id

    def deactivate(self, node: int) -> None:
        """Say that a node is gone."""
        self.client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    def heartbeat(self, interval: float) -> bool:
        """Whether the link knows the node; it expects the next one so soon."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=interval)
        return self.client.SendNodeHeartbeat(request).success

    def pull(self) -> tuple[Message, Tree] | None:
        """The head of the next message, if there is one, and its parts."""
        found = self.client.PullMessages(PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        return message_from_proto(found.messages_list[0]), found.message_object_trees[0]

    def push(self, message: MessageParts, seconds: float) -> Asked:
        """Push the head of a reply that took so many seconds."""
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[message.head],
            message_object_trees=[message.tree],
            clientapp_runtime_list=[seconds],
        )
        found = self.client.PushMessages(request)
        return Asked([], found.objects_to_push, found.session_id)

    def open_parts(self, run: int) -> Stored:
        """The parts of the messages of a run."""
        return Stored(self.client, self._node, run)


class Server:
    """The calls of a server to the link, by the client inside of Flower's Grid."""

    def __init__(self, grid: Any):
        self.client = grid._runtime_client
        self.stored = Stored(self.client, grid.node, grid.run.run_id)

    def push(self, messages: Sequence[MessageParts]) -> Asked:
        """Push the heads of messages."""
        request = PushAppMessagesRequest(
            messages_list=[one.head for one in messages],
            message_object_trees=[one.tree for one in messages],
        )
        found = self.client.PushMessages(request)
        return Asked(found.message_ids, found.objects_to_push, found.session_id)

    def pull(self, ids: Sequence[str]) -> list[tuple[str, str, Tree]]:
        """The replies that are there: id of the request, own id and parts of each."""
        found = self.client.PullMessages(PullAppMessagesRequest(message_ids=ids))
        heads = [one.metadata for one in found.messages_list]
        return [
            (head.reply_to_message_id, head.message_id, tree)
            for head, tree in zip(heads, found.message_object_trees, strict=True)
        ]


GONE = "unregistered"
"""Flower's status of a node whose key was unregistered; the link remembers its id."""


class Control:
    """The calls to the link that register the keys of nodes.

    Args:
        address: host and port of the link.
        ca: file of the authority that signed the link's certificate.

    Raises:
        RunError: of each call: one line of what the link answered.
    """

    def __init__(self, address: str, ca: Path):
        about = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        self._address = address
        self.client = ControlHttpClient.from_server_address(
            address, False, _authority(ca), about
        )

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def statuses(self) -> dict[str, str]:
        """The status of every node that is registered, by the link's id of it."""
        found = self._call(self.client.ListNodes, ListNodesRequest()).nodes_info
        return {str(one.node_id): one.status for one in found if one.status != GONE}

    def register(self, key: Path, name: str) -> str:
        """Register a public key; the link's id of the node."""
        public = public_key_to_bytes(public_node_key(key))
        request = RegisterNodeRequest(public_key=public, name=name)
        return str(self._call(self.client.RegisterNode, request).node_id)

    def unregister(self, id: str) -> None:
        """Unregister the key of a node."""
        request = UnregisterNodeRequest(node_id=int(id))
        self._call(self.client.UnregisterNode, request)

    def _call(self, call: Any, request: Any) -> Any:
        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            why = f"HTTP {error.response.status_code}: {one_line(error.response.text)}"
        except (httpx.HTTPError, ValueError) as error:
            why = one_line(error) or type(error).__name__
        raise RunError(f"link {self._address}: {why}")


def _authority(ca: Path) -> bytes:
    """The certificate of the federation's authority; no other is trusted."""
    return certificate(ca).public_bytes(Encoding.PEM)
