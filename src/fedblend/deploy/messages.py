# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Messages between the server and a node: one packed byte array with a checked header.

A message is a tree of arrays in the layout of ``wire``, whose metadata say what it is:
the kind, the experiment, the round, the attempt, the client, the round whose state the
client has to start from, a mark, and words in JSON. A checksum covers all of it.
Nothing in a message names code.

The mark is a hash of what is asked, and an answer repeats it: a server that went back
to older books may ask for a round again, with another message, and must not take an
answer to the first one for it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend.core import Key, PyTree
from fedblend.simulation.serialize import (
    WireError,
    arrived,
    named_leaves,
    pack,
    traveling,
    unpack,
)

KINDS = ("meet", "enroll", "round", "measure", "refused")
"""A node is met, enrolled, asked for rounds, and measures; or it refuses."""
ENROLLED, UNKNOWN = -1, -2
"""In place of a round: the state after enrollment, and no state at all."""
UNREAD = "unread"
"""In place of the experiment: the answer to a message that could not be read."""
LONGEST_HEADER = 1 << 20
"""Bytes: names, shapes and words of a message are never more."""
LONGEST_LINE = 200
"""Characters that are kept of what somebody else wrote."""
_NUMBERS = ("round", "attempt", "client", "base")
_DIGITS, _NAME = re.compile(r"-?[0-9]{1,10}"), re.compile(r"[A-Za-z0-9]{1,64}")
_MARK = re.compile(r"([0-9a-f]{64})?")
_LARGEST = 2**31


class Message(NamedTuple):
    """What was written, or arrived; ``arrays`` are by name."""

    kind: str
    experiment: str
    client: int
    round: int = UNKNOWN
    attempt: int = 0
    base: int = UNKNOWN
    mark: str = ""
    words: Mapping[str, Any] = {}
    arrays: Mapping[str, np.ndarray] = {}

    def answer(self, kind: str | None = None, **words: Any) -> "Message":
        """The head of an answer to this message."""
        return self._replace(kind=kind or self.kind, words=words, arrays={})


def write(message: Message, payload: PyTree = ()) -> bytes:
    """A message with what of a message really travels."""
    content = traveling(payload)
    head = {name: str(getattr(message, name)) for name in _NUMBERS}
    return pack(
        content,
        {
            **head,
            "kind": message.kind,
            "mark": message.mark,
            "experiment": message.experiment,
            "words": json.dumps(dict(message.words), allow_nan=False),
        },
    )


def read(data: bytes, longest: int | None = None) -> Message:
    """The message in these bytes.

    Args:
        data: what arrived.
        longest: refuse what has more bytes than this, before looking at it.

    Raises:
        WireError: it is no message, and why.
    """
    if longest is not None and len(data) > longest:
        raise WireError(f"{len(data)} bytes, at most {longest} are taken")
    if int.from_bytes(data[:8], "little") > LONGEST_HEADER:
        raise WireError(f"a header of more than {LONGEST_HEADER} bytes")
    arrays, head = unpack(data)
    try:
        numbers = {name: _number(head[name]) for name in _NUMBERS}
        words = json.loads(head["words"])
        kind, experiment, mark = head["kind"], head["experiment"], head["mark"]
        marked = _MARK.fullmatch(mark)
        # It becomes the name of a folder.
        named = _NAME.fullmatch(experiment)
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"head is damaged ({type(error).__name__})") from None
    if kind not in KINDS or not isinstance(words, dict):
        raise WireError(f"no kind of message: {str(kind)[:40]!r}")
    if any(not UNKNOWN <= number < _LARGEST for number in numbers.values()):
        raise WireError(f"numbers out of range: {numbers}")
    if not named or not marked:
        raise WireError("the name of the experiment is damaged, or the mark")
    return Message(kind, experiment, mark=mark, words=words, arrays=arrays, **numbers)


def _number(text: str) -> int:
    """A number as it is written, and in no other way that ``int`` would read."""
    if not _DIGITS.fullmatch(text):
        raise ValueError(text[:40])
    return int(text)


def line(text: Any) -> str:
    """What somebody else wrote, as one short line that any log can hold."""
    spaced = " ".join(str(text)[:LONGEST_LINE].split())
    return "".join(c if " " <= c <= "~" else "?" for c in spaced)


def content(message: Message, template: PyTree, key: Key, told: PyTree = ()) -> PyTree:
    """The message in a message, in the structure of the template.

    ``told`` is what an answer may quote.

    Raises:
        WireError: names, shapes or dtypes are not those of the template.
    """
    return arrived(message.arrays, template, key, message.client, told)


def fingerprint(template: PyTree) -> str:
    """A hash of names, shapes and dtypes: both sides must mean the same."""
    paths, _ = jax.tree_util.tree_flatten_with_path(template)
    described = [
        (jax.tree_util.keystr(path), str(leaf.dtype), list(leaf.shape))
        for path, leaf in paths
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def marked(message: Message, payload: PyTree) -> Message:
    """The head of a message with the mark of what it asks."""
    arrays = named_leaves(traveling(payload))
    held = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    return message._replace(mark=digest(message._replace(arrays=held)))


def digest(message: Message) -> str:
    """A hash of what a message holds and starts from, whenever it is sent."""
    words = json.dumps(dict(message.words), sort_keys=True)
    asked = f"{message.kind} {message.round} {message.base} {words}"
    found = hashlib.sha256(asked.encode())
    for name, array in sorted(message.arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
