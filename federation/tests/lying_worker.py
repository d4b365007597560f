# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The worker of a node that lies: ``python lying_worker.py node.toml``.

It trains as it should, and sends something else in some rounds.
"""

import struct
import sys
from collections.abc import Callable
from pathlib import Path

from trials import apart, forged

from fedblend_federation import message as messages
from fedblend_federation import worker
from fedblend_federation.client.node import answering
from fedblend_federation.ops.settings import NodeSettings, load_as


def _numbers(value: float) -> Callable[[bytes], bytes]:
    def spoil(data: bytes) -> bytes:
        header, metadata, body = apart(data)
        begin, _ = next(iter(header.values()))["data_offsets"]
        body[begin : begin + 4] = struct.pack("<f", value)
        return forged(header, metadata, body)

    return spoil


def _turned(data: bytes) -> bytes:
    header, metadata, body = apart(data)
    for entry in header.values():
        entry["shape"] = [*entry["shape"], 1]
    return forged(header, metadata, body)


SPOILT = {
    1: (_numbers(float("nan")), "rejected", "not finite"),
    2: (_turned, "rejected", "expected float32"),
    3: (None, "stray", "round 0, late or replayed"),
    4: (_numbers(1e30), "rejected", "at most 50 is allowed"),
    5: (lambda data: data[:-5], "rejected", "damaged"),
}
"""By round: what is done to the answer, or that of the first is given again, and what
the server has to say about it."""


def _serve(path: Path) -> None:
    node, said = answering(load_as(NodeSettings, path)), {}

    def reply(data: bytes) -> bytes:
        honest = node.reply(data)
        message = messages.decode(honest)
        if message.kind != "round":
            return honest
        said.setdefault(message.round, honest)
        spoil = SPOILT.get(message.round, (lambda data: data, "", ""))[0]
        return said[0] if spoil is None else spoil(honest)

    socket = load_as(NodeSettings, path).worker_socket
    worker.serve(socket, lambda: worker.Handler(reply))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
