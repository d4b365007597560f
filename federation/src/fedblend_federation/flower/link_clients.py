# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node's calls to a link, with its key.

A call waits for a link that cannot be reached, and responses have a limit.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
from flwr.app import Error, Message, RecordDict

from fedblend_federation.flower import private
from fedblend_federation.flower.processes import clock_remark
from fedblend_federation.flower.records import (
    KIND,
    content_of,
    make_record,
    pause_in,
    read_record,
)
from fedblend_federation.ops.key_files import node_key

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
Delivery = tuple[Message, private.Tree]
"""A message that the link has handed out; its content is still there."""

Result = TypeVar("Result")


class Foreign(ValueError):
    """A message or a response that is not fedblend's, and why: one line."""


class Lost(Exception):
    """The link does not accept this node's key or id."""


class Gone(Exception):
    """The run that a message belongs to has ended."""


class Failed(Exception):
    """The link answered a call with another error, and which."""


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
        self._fleet = private.Fleet(address, ca, node_key(key), _check_size)
        self._address, self._log = address, log
        self.pause: float | None = None
        """Seconds between two pulls, as the server told with its newest message."""

    def close(self) -> None:
        """Close the connections to the link."""
        self._fleet.close()

    def activate(self, interval: float) -> int:
        """Tell the link that the node is there; returns the link's id of it.

        Args:
            interval: seconds; the node is offline after two of them with no heartbeat.
        """
        return self._call(lambda: self._fleet.activate(interval))

    def deactivate(self, node: int) -> bool:
        """Tell the link that the node is offline; whether the link heard it."""
        try:
            self._fleet.deactivate(node)
        except (httpx.HTTPError, ValueError):
            return False
        return True

    def heartbeat(self, interval: float) -> bool:
        """Send a heartbeat; False if the link does not know this node."""
        try:
            return self._fleet.heartbeat(interval)
        except httpx.HTTPStatusError as error:
            return error.response.status_code != httpx.codes.UNAUTHORIZED
        except (httpx.HTTPError, ValueError):
            return True  # not reached: the next one may be

    def pull(self) -> Delivery | None:
        """Take the next message, if there is one."""
        return self._call(self._fleet.pull)

    def read(self, delivery: Delivery, max_bytes: int | None) -> bytes:
        """The bytes of a message of ours; refused as soon as they are too many.

        Raises:
            Foreign: the message is not fedblend's.
        """
        (message, tree), found, size = delivery, {}, 0
        kind = message.metadata.message_type
        stored = self._fleet.open_parts(message.metadata.run_id)
        if kind != KIND:
            raise Foreign(f"a message of type {kind[:40]!r}")
        for id in private.list_needed_parts(tree):
            content = self._part(stored, id)
            found[id] = content
            size += len(content)
            if max_bytes is not None and size > max_bytes + OVERHEAD:
                raise Foreign(f"more than {max_bytes} bytes, the most that is accepted")
        self._call(lambda: stored.confirm(message.metadata.message_id))
        try:
            whole = content_of(found, tree)
            data = read_record(whole) if isinstance(whole, RecordDict) else b""
            if isinstance(whole, RecordDict):
                self.pause = pause_in(whole)
        except Exception as error:
            raise Foreign(f"not a message of Flower: {type(error).__name__}") from None
        if not data:
            raise Foreign("a message without fedblend's record")
        return data

    def _part(self, stored: private.Stored, id: str) -> bytes:
        """A part of a message, which the server may still be pushing."""
        until = time.monotonic() + PARTS
        while True:
            known, content = self._call(lambda: stored.pull(id))
            if content is not None:
                return content
            if not known or time.monotonic() > until:
                raise Foreign("a message of which a part is missing")
            time.sleep(PARTS_INTERVAL)

    def reply(self, delivery: Delivery, data: bytes | str, seconds: float) -> None:
        """Push the reply to a message.

        Args:
            delivery: the message.
            data: our reply, or the line of an error.
            seconds: that the reply took.
        """
        content = Error(REFUSED, data) if isinstance(data, str) else make_record(data)
        reply = Message(content, reply_to=delivery[0])
        parts = private.take_apart(reply)
        pushed = self._call(lambda: self._fleet.push(parts, seconds))
        # The server, which is ours, does not ask for the others.
        needed = set(private.list_needed_parts(parts.tree))
        stored = self._fleet.open_parts(reply.metadata.run_id)
        for id in [one for one in pushed.parts if one in needed]:
            self._call(partial(stored.push, id, parts.contents[id], pushed.session))

    def _call(self, call: Callable[[], Result]) -> Result:
        """The link's response; asked again for as long as it cannot be reached."""
        waited = False
        while True:
            try:
                response = call()
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


def _check_size(response: httpx.Response) -> None:
    """Refuse a response that is too large, or does not say how large it is."""
    length = response.headers.get("content-length", "")
    encoded = "content-encoding" in response.headers
    if not length.isdecimal() or int(length) > MAX_RESPONSE or encoded:
        raise Foreign(
            f"a response of {length[:20] or 'unknown'} bytes, at most {MAX_RESPONSE}"
        )
