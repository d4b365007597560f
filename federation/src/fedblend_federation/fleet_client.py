# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The calls of Flower's fleet API that a node needs, with the node's key.

Activate, heartbeat, pull, push. The call that hands out an app, which is code, is not
among them. A call waits for a link that cannot be reached, and responses have a limit.
"""

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_private_key
from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
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
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.interceptors.http.runtime_version import (
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedblend.errors import RunError
from fedblend_federation.clock_skew import clock_remark
from fedblend_federation.flower import (
    KIND,
    content_of,
    from_record,
    needed_parts,
    pause_in,
    to_record,
)

RETRY = 2.0
"""Seconds between two attempts to reach the link."""
PARTS = 120.0
"""Seconds for which a part of a message may be missing."""
PARTS_INTERVAL = 0.05
"""Seconds between two attempts to get it."""
MAX_RESPONSE = 64 << 20
"""Bytes of one response of the link; Flower cuts arrays in pieces of 5 MB."""
OVERHEAD = 1 << 16
"""Bytes that Flower's wrapping may add to a message."""
UNAVAILABLE = (429, 502, 503, 504)
"""Codes of HTTP with which a proxy says that a call should be tried again."""
REFUSED = 1
"""Flower's code of an error that has no other."""

Request = TypeVar("Request")
Response = TypeVar("Response")


class Foreign(ValueError):
    """A message or a response that is not fedblend's, and why: one line."""


class Lost(Exception):
    """The link does not accept this node's key or id."""


class Gone(Exception):
    """The run that a message belongs to has ended."""


class Failed(Exception):
    """The link answered a call with another error, and which."""


class Delivery(NamedTuple):
    """A message that the link has handed out; its content is still there."""

    message: Message
    tree: ObjectTree


class FleetClient:
    """The fleet API of one link, for one node.

    Args:
        address: of the link, or of the proxy before it: host:port.
        ca: file of the authority that signed the link's certificate.
        key: file of the node's private key.
        log: called with a line when the link cannot be reached, and when it can again.
    """

    def __init__(
        self, address: str, ca: Path, key: Path, log: Callable[[str], None]
    ) -> None:
        own = _private_key(key)
        self._public = public_key_to_bytes(own.public_key())
        self._client = _client(address, ca, own)
        self._address, self._log = address, log
        self._node = Node()
        self.pause: float | None = None
        """Seconds between two pulls, as the server told with its newest message."""

    def close(self) -> None:
        """Close the connections to the link."""
        self._client.close()

    def activate(self, interval: float) -> int:
        """Tell the link that the node is there; returns the link's id of it.

        Args:
            interval: seconds; the node is offline after two of them with no heartbeat.
        """
        request = ActivateNodeRequest(
            public_key=self._public, heartbeat_interval=interval
        )
        self._node = Node(
            node_id=self._call(self._client.ActivateNode, request).node_id
        )
        return self._node.node_id

    def deactivate(self, node: int) -> bool:
        """Tell the link that the node is offline; whether the link heard it."""
        try:
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        except (httpx.HTTPError, ValueError):
            return False
        return True

    def heartbeat(self, interval: float) -> bool:
        """Send a heartbeat; False if the link does not know this node."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=interval)
        try:
            return self._client.SendNodeHeartbeat(request).success
        except httpx.HTTPStatusError as error:
            return error.response.status_code != httpx.codes.UNAUTHORIZED
        except (httpx.HTTPError, ValueError):
            return True  # not reached: the next one may be

    def pull(self) -> Delivery | None:
        """Take the next message, if there is one."""
        request = PullMessagesRequest(node=self._node)
        pulled = self._call(self._client.PullMessages, request)
        if not pulled.messages_list:
            return None
        message = message_from_proto(pulled.messages_list[0])
        return Delivery(message, pulled.message_object_trees[0])

    def read(self, delivery: Delivery, max_bytes: int | None) -> bytes:
        """The bytes of a message of ours; refused as soon as they are too many.

        Raises:
            Foreign: the message is not fedblend's.
        """
        (message, tree), found, size = delivery, {}, 0
        run, kind = message.metadata.run_id, message.metadata.message_type
        if kind != KIND:
            raise Foreign(f"a message of type {kind[:40]!r}")
        for id in needed_parts(tree):
            content = self._part(run, id)
            found[id] = content
            size += len(content)
            if max_bytes is not None and size > max_bytes + OVERHEAD:
                raise Foreign(f"more than {max_bytes} bytes, the most that is accepted")
        received = ConfirmMessageReceivedRequest(
            node=self._node, run_id=run, message_object_id=message.metadata.message_id
        )
        self._call(self._client.ConfirmMessageReceived, received)
        try:
            whole = content_of(found, tree)
            data = from_record(whole) if isinstance(whole, RecordDict) else b""
            if isinstance(whole, RecordDict):
                self.pause = pause_in(whole)
        except Exception as error:
            raise Foreign(f"no message of Flower: {type(error).__name__}") from None
        if not data:
            raise Foreign("a message without fedblend's record")
        return data

    def _part(self, run: int, id: str) -> bytes:
        """A part of a message, which the server may still be pushing."""
        until = time.monotonic() + PARTS
        request = PullObjectRequest(node=self._node, run_id=run, object_id=id)
        while True:
            pulled = self._call(self._client.PullObject, request)
            if pulled.object_available:
                return pulled.object_content
            if not pulled.object_found or time.monotonic() > until:
                raise Foreign("a message of which a part is missing")
            time.sleep(PARTS_INTERVAL)

    def reply(self, delivery: Delivery, data: bytes | str, seconds: float) -> None:
        """Push the reply to a message.

        Args:
            delivery: the message.
            data: our reply, or the line of an error.
            seconds: that the reply took.
        """
        content = Error(REFUSED, data) if isinstance(data, str) else to_record(data)
        reply = Message(content, reply_to=delivery.message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            tree, parts = get_object_tree(reply), get_all_nested_objects(reply)
            bare = message_to_proto(remove_content_from_message(reply))
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[bare],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
            pushed = self._call(self._client.PushMessages, request)
            # The server, which is ours, does not ask for the others.
            needed = set(needed_parts(tree))
            for id in [one for one in pushed.objects_to_push if one in needed]:
                part = PushObjectRequest(
                    node=self._node,
                    run_id=reply.metadata.run_id,
                    object_id=id,
                    object_content=parts[id].deflate(),
                    session_id=pushed.session_id,
                )
                self._call(self._client.PushObject, part)

    def _call(self, call: Callable[[Request], Response], request: Request) -> Response:
        """The link's response; asked again for as long as it cannot be reached."""
        waited = False
        while True:
            try:
                response = call(request)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            except httpx.HTTPStatusError as error:
                code = error.response.status_code
                reason = f"HTTP {code}"
                if code == httpx.codes.UNAUTHORIZED:
                    remark = clock_remark(error.response.headers.get("date"))
                    why = reason if remark is None else f"{reason}; {remark}"
                    raise Lost(why) from None
                if code == httpx.codes.FORBIDDEN:
                    raise Gone(reason) from None
                if code not in UNAVAILABLE:
                    raise Failed(reason) from None
            else:
                if waited:
                    self._log(f"{self._address} can be reached again")
                return response
            if not waited:
                self._log(f"{self._address}: {reason}; trying again")
            waited = True
            time.sleep(RETRY)


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except Exception as error:
        raise RunError(f"{path}: is no private key ({type(error).__name__})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RunError(f"{path}: is no ECDSA key, as ssh-keygen -t ecdsa -b 384 makes")
    return key


def _client(address: str, ca: Path, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
    """Flower's client, which trusts the federation's authority and no other."""
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    try:
        trusted = ca.read_bytes()
        client = FleetHttpClient.from_server_address(
            address, False, trusted, interceptors
        )
    except (OSError, ValueError) as error:
        unreadable = isinstance(error, ssl.SSLError | ValueError)
        why = "is no certificate" if unreadable else error.strerror
        raise RunError(f"{ca}: {why}") from None
    connection = client._client
    connection.follow_redirects = False
    connection.headers["accept-encoding"] = "identity"
    connection.event_hooks = {"response": [_check_size]}
    return client


def _check_size(response: httpx.Response) -> None:
    """Refuse a response that is too large, or does not say how large it is."""
    length = response.headers.get("content-length", "")
    encoded = "content-encoding" in response.headers
    if not length.isdecimal() or int(length) > MAX_RESPONSE or encoded:
        raise Foreign(
            f"a response of {length[:20] or 'unknown'} bytes, at most {MAX_RESPONSE}"
        )
