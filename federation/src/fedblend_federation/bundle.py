# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Bundles: the messages of several clients of one node, as one piece of bytes.

A node may host many clients. The server sends it one bundle with the requests for some
of them, and gets one bundle with their replies. The requests of a round often have the
same arrays: a bundle holds equal bodies once, so that its size grows with the heads.
The messages come out as they went in, to the byte.

::

    MAGIC, length of the header (4 bytes)
    header: {"bodies": [bytes of each], "entries": [[client, bytes of head, body], ...]}
    heads, bodies

No message begins like a bundle: its first eight bytes would be the length of a header
that is far too long.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from fedblend.simulation.io.serialize import WireError

MAGIC = b"fbbundle"
MOST = 100_000
"""Clients in a bundle."""
LARGEST = 1 << 30
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
        entries, sizes = _checked(json.loads(data[start : start + length]))
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


def _checked(found: Any) -> tuple[list[tuple[int, int, int]], list[int]]:
    sizes = [_natural(size) for size in found["bodies"]]
    entries = [
        (_natural(client), _natural(size), _natural(body))
        for client, size, body in found["entries"]
    ]
    if len(entries) > MOST or len({client for client, _, _ in entries}) < len(entries):
        raise ValueError("too many clients, or one of them twice")
    if any(body >= len(sizes) for _, _, body in entries):
        raise ValueError("a message without a body")
    return entries, sizes


def _natural(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**40:
        raise ValueError("no size")
    return number
