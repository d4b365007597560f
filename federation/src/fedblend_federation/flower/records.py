# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Our messages inside of Flower's.

Each of our messages is one piece of bytes in a Flower message; rounds, deadlines and
resending are our own (``transport``).
"""

from collections.abc import Mapping
from math import inf

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    RecordDict,
)

from fedblend_federation.flower.private import Tree, put_together

RECORD, ARRAY, PAUSE, KIND = "fedblend", "message", "pause", "query"
SMALL = 4 << 20
"""Bytes of a message that travels in one piece: Flower makes a call for every piece,
and an array has two more. Flower's own pieces of arrays are as large."""
TTL = 3600.0
"""Seconds that Flower keeps a message; ours are sent again long before."""


def make_record(message: bytes, pause: float | None = None) -> RecordDict:
    """A message as the content of a Flower message.

    Args:
        message: ours.
        pause: seconds that a node should wait between two questions for messages; told
            where the message travels in one piece.
    """
    if len(message) <= SMALL:
        told = {} if pause is None else {PAUSE: pause}
        return RecordDict({RECORD: ConfigRecord({ARRAY: message, **told})})
    array = Array(dtype="uint8", shape=(len(message),), stype="fedblend", data=message)
    return RecordDict({RECORD: ArrayRecord({ARRAY: array})})


def read_record(content: RecordDict) -> bytes:
    """The message in a Flower message; empty if there is none."""
    if RECORD in content.config_records:
        small = content.config_records[RECORD].get(ARRAY)
        return small if isinstance(small, bytes) else b""
    try:
        return bytes(content.array_records[RECORD][ARRAY].data)
    except (KeyError, AttributeError):
        return b""


def content_of(parts: Mapping[str, bytes], tree: Tree) -> RecordDict | Error:
    """What a message has, from the parts that are needed; or the error in its place.

    Raises:
        ValueError: it is no message of ours.
    """
    found = put_together(parts, tree)
    if isinstance(found, ConfigRecord):
        return RecordDict({RECORD: found})
    if not isinstance(found, Message):
        raise ValueError("the reply is not a message of fedblend")
    return found.error if found.has_error() else found.content


def pause_in(content: RecordDict) -> float | None:
    """The pause that the server asks for, if it does."""
    pause = content.config_records.get(RECORD, {}).get(PAUSE)
    return pause if isinstance(pause, float) and 0 <= pause < inf else None
