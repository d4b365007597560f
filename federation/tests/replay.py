# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A federation's history, from its audit, replayed in one process.

A client that did not count in a round refuses in that round here: the models must come
out the same to the bit, whatever had kept the node away there.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedblend.simulation.serialize import unpack
from fedblend_federation import message as messages
from fedblend_federation.client.node import Node, node_of
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

_ABSENT = re.compile(r"client (\d+) (silent|refused|rejected)")
Absences = dict[int, dict[int, str]]


def absences(out: Path) -> Absences:
    """Which clients did not count in which round, and in what way."""
    found = {}
    for line in (out / "audit.jsonl").read_text().splitlines():
        note = json.loads(line)
        if note["event"] == "round":
            away = _ABSENT.findall(note["fields"]["others"])
            found[note["fields"]["round"]] = {int(who): how for who, how in away}
    return found


def models(out: Path, homes: Sequence[Path]) -> list[dict[str, bytes]]:
    """The shared model, and that of every node, as bytes."""
    name = json.loads((out / "server" / "experiment.json").read_text())["experiment"]
    places = [home / "state" / name / "personal.safetensors" for home in homes]
    return [
        {leaf: array.tobytes() for leaf, array in unpack(path.read_bytes())[0].items()}
        for path in (out / "model.safetensors", *places)
    ]


class Recorded:
    """A node whose requests and replies are recorded."""

    def __init__(self, node: Node, record: list[tuple[bytes, bytes]]):
        self._node, self._record = node, record

    def reply(self, data: bytes) -> bytes:
        sent = self._node.reply(data)
        self._record.append((data, sent))
        return sent


def replayed(
    out: Path,
    homes: Sequence[Path],
    away: Mapping[int, Mapping[int, str]],
    into: Path,
    record: list[tuple[bytes, bytes]] | None = None,
) -> list[dict[str, bytes]]:
    """What nodes with the same rows come to if these are away in these rounds.

    ``record`` gets all messages, and the replies to them.
    """
    record = [] if record is None else record
    run, places = into / "run", [into / home.name for home in homes]
    run.mkdir(parents=True)
    shutil.copy(out / "config.toml", run)
    nodes: dict[int, Any] = {}
    for client, (home, place) in enumerate(zip(homes, places, strict=True)):
        for file in ("node.toml", "policy.toml", "rows.npz"):
            place.mkdir(exist_ok=True)
            shutil.copy(home / file, place)
        node = node_of(load_as(NodeSettings, place / "node.toml"))
        nodes[client] = Recorded(node, record)
    transport = LoopbackTransport(nodes)

    def spoil(client: int, data: bytes) -> list[bytes]:
        message = messages.decode(data)
        if message.kind == "round" and client in away.get(message.round, ()):
            return [messages.encode(message.reply("refused", reason="away"))]
        return [data]

    transport.spoil = spoil
    run_server(run, transport, poll=0.0)
    return models(run, places)
