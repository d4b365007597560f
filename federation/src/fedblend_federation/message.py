# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Messages between the server and a node: one packed byte array with a checked header.

A message is a tree of arrays in the layout of ``simulation.serialize``. Its metadata
hold the kind, the experiment, the round, the attempt, the client, the round whose state
the client starts from, a digest of the request, and further fields as JSON. A checksum
covers all of it. Nothing in a message names code.

A reply repeats the digest of its request. A server that went back to an older
checkpoint may ask for a round again with other contents, and must not take the reply to
the first request for the reply to the second.

A node may host many clients. The server sends it one *bundle*, which holds the requests
for several of them, and gets one bundle with their replies. The requests of a round
often have the same arrays: a bundle holds equal bodies once, so that its size grows
with the heads. The messages come out as they went in, to the byte.

::

    MAGIC, length of the header (4 bytes)
    header: {"bodies": [bytes of each], "entries": [[client, bytes of head, body], ...]}
    heads, bodies

No message begins like a bundle: its first eight bytes would be the length of a header
that is far too long.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.simulation.serialize import (
    DAMAGE,
    WireError,
    complete_message,
    name_leaves,
    pack,
    traveling,
    unpack,
)

KINDS = (
    *("describe", "enroll", "round", "measure", "stop", "refused"),
    *("share", "join", "unmask"),
)
"""Requests: to describe itself, to enroll, to train for a round, to measure, to end an
experiment. A node that does not do what is asked replies with ``refused``. Secure sums
have three more: to share secrets, to send what enrollment left, to open a sum."""
ENROLLED, UNKNOWN = -1, -2
"""In place of a round: the state after enrollment, and no state at all."""
UNREADABLE = "unread"
"""In place of the experiment: the reply to a message that could not be decoded."""
MAX_HEADER_BYTES = 1 << 20
MAX_LINE = 200
"""Characters that are kept of a text that another machine sent."""
_NUMBERS = ("round", "attempt", "client", "base")
_DIGITS, _NAME = re.compile(r"-?[0-9]{1,10}"), re.compile(r"[A-Za-z0-9]{1,64}")
_DIGEST = re.compile(r"([0-9a-f]{64})?")
_LARGEST = 2**31


class Message(NamedTuple):
    """The head of a message; ``arrays`` are those that arrived, by name.

    ``base`` is the round whose state the client starts from, ``audit`` the newest hash
    of the sender's audit.
    """

    kind: str
    experiment: str
    client: int
    round: int = UNKNOWN
    attempt: int = 0
    base: int = UNKNOWN
    digest: str = ""
    audit: str = ""
    fields: Mapping[str, Any] = {}
    arrays: Mapping[str, np.ndarray] = {}

    def reply(self, kind: str | None = None, **fields: Any) -> "Message":
        """The head of a reply to this message."""
        return self._replace(kind=kind or self.kind, audit="", fields=fields, arrays={})


def encode(message: Message, payload: PyTree = ()) -> bytes:
    """The bytes of a message, with those leaves of the payload that travel."""
    head = {name: str(getattr(message, name)) for name in _NUMBERS}
    return pack(
        traveling(payload),
        {
            **head,
            "kind": message.kind,
            "digest": message.digest,
            "audit": message.audit,
            "experiment": message.experiment,
            "fields": json.dumps(dict(message.fields), allow_nan=False),
        },
    )


def decode(data: bytes, max_bytes: int | None = None) -> Message:
    """The message in these bytes.

    Args:
        data: what arrived.
        max_bytes: longer data are refused unread.

    Raises:
        WireError: the bytes are no message, and why.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise WireError(f"{len(data)} bytes, at most {max_bytes} are accepted")
    if int.from_bytes(data[:8], "little") > MAX_HEADER_BYTES:
        raise WireError(f"a header of more than {MAX_HEADER_BYTES} bytes")
    arrays, head = unpack(data)
    try:
        numbers = {name: _number(head[name]) for name in _NUMBERS}
        fields = json.loads(head["fields"])
        kind, experiment = head["kind"], head["experiment"]
        digest, audit = head["digest"], head["audit"]
        # The experiment becomes the name of a folder.
        well_formed = _NAME.fullmatch(experiment) and all(
            map(_DIGEST.fullmatch, (digest, audit))
        )
    except DAMAGE as error:
        raise WireError(f"head is damaged ({type(error).__name__})") from None
    if kind not in KINDS or not isinstance(fields, dict):
        raise WireError(f"unknown kind of message: {str(kind)[:40]!r}")
    if any(not UNKNOWN <= number < _LARGEST for number in numbers.values()):
        raise WireError(f"numbers out of range: {numbers}")
    if not well_formed:
        raise WireError("the name of the experiment or a hash is damaged")
    return Message(
        kind,
        experiment,
        digest=digest,
        audit=audit,
        fields=fields,
        arrays=arrays,
        **numbers,
    )


def _number(text: str) -> int:
    """A number in plain digits; ``int`` would also read other spellings."""
    if not _DIGITS.fullmatch(text):
        raise ValueError(text[:40])
    return int(text)


def one_line(text: object) -> str:
    """A text from another machine as one short line of printable ASCII."""
    spaced = " ".join(str(text)[:MAX_LINE].split())
    return "".join(c if " " <= c <= "~" else "?" for c in spaced)


def payload_of(message: Message, template: PyTree) -> PyTree:
    """The payload of a message, in the structure of the template.

    Raises:
        WireError: names, shapes or dtypes are not those of the template.
    """
    return complete_message(message.arrays, template)


def schema_hash(template: PyTree) -> str:
    """A hash of names, shapes and dtypes, to compare those of two machines."""
    paths, _ = jax.tree_util.tree_flatten_with_path(template)
    described = [
        (jax.tree_util.keystr(path), str(leaf.dtype), list(leaf.shape))
        for path, leaf in paths
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def add_digest(message: Message, payload: PyTree) -> Message:
    """The head of a request with the digest of head and payload."""
    leaves = name_leaves(traveling(payload))
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    return message._replace(digest=digest_of(message._replace(arrays=arrays)))


def digest_of(message: Message) -> str:
    """A hash of what a message asks; the number of the attempt does not count."""
    fields = json.dumps(dict(message.fields), sort_keys=True)
    head = f"{message.kind} {message.round} {message.base} {fields}"
    found = hashlib.sha256(head.encode())
    for name, array in sorted(message.arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


MAGIC = b"fbbundle"
MOST_BUNDLED = 100_000
"""Clients in a bundle."""
LARGEST_BUNDLE = 1 << 30
"""Bytes of the messages in a bundle, where nobody sets another limit."""
_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<Q")


def is_bundle(data: bytes) -> bool:
    """Whether these bytes are a bundle, or else a message."""
    return data.startswith(MAGIC)


def pack_bundle(messages: Iterable[tuple[int, bytes]]) -> bytes:
    """The bundle of messages, each with the client that it is to, or from."""
    entries, heads, bodies = [], [], dict[bytes, int]()
    for client, message in messages:
        end = len(message)
        if end >= _HEADER.size:
            end = min(end, _HEADER.size + _HEADER.unpack_from(message)[0])
        heads.append(message[:end])
        entries.append((client, end, bodies.setdefault(message[end:], len(bodies))))
    about = {"bodies": [len(body) for body in bodies], "entries": entries}
    header = json.dumps(about).encode()
    return b"".join((MAGIC, _LENGTH.pack(len(header)), header, *heads, *bodies))


def unpack_bundle(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The messages in a bundle, each with its client; one at a time in memory.

    Raises:
        WireError: the bytes are no bundle, and why; before the first message.
    """
    try:
        (length,) = _LENGTH.unpack_from(data, len(MAGIC))
        start = len(MAGIC) + _LENGTH.size
        entries, sizes = _bundle_header(json.loads(data[start : start + length]))
    except (struct.error, ValueError, LookupError, TypeError, RecursionError) as error:
        raise WireError(f"a bundle with a damaged header ({error!s:.60})") from None
    at = start + length
    heads = [at]
    for _, size, _ in entries:
        heads.append(heads[-1] + size)
    bodies = [heads[-1]]
    for size in sizes:
        bodies.append(bodies[-1] + size)
    if bodies[-1] != len(data):
        raise WireError(f"a bundle of {len(data)} bytes, its header says {bodies[-1]}")
    return (
        (client, data[head : head + size] + data[bodies[body] : bodies[body + 1]])
        for head, (client, size, body) in zip(heads, entries, strict=False)
    )


def _bundle_header(found: Any) -> tuple[list[tuple[int, int, int]], list[int]]:
    sizes = [_natural(size) for size in found["bodies"]]
    entries = [
        (_natural(client), _natural(size), _natural(body))
        for client, size, body in found["entries"]
    ]
    if len(entries) > MOST_BUNDLED or len({client for client, _, _ in entries}) < len(
        entries
    ):
        raise ValueError("too many clients, or one of them twice")
    if any(body >= len(sizes) for _, _, body in entries):
        raise ValueError("a message without a body")
    return entries, sizes


def _natural(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**40:
        raise ValueError("no size")
    return number
