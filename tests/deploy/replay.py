# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A federation's history, from its audit, told again in one process.

Whoever was not heard in a round refuses in that round here: the models must come out
the same to the bit, whatever had kept a node away there.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedblend.deploy import messages
from fedblend.deploy.client.node import Node
from fedblend.deploy.client.setup import node_of
from fedblend.deploy.ops.settings import Node as Settings
from fedblend.deploy.ops.settings import load_as
from fedblend.deploy.server.run import lead
from fedblend.simulation.serialize import unpack
from loopback import Box

_ABSENT = re.compile(r"client (\d+) (silent|refused|rejected)")
Absences = dict[int, dict[int, str]]


def absences(out: Path) -> Absences:
    """Who was not heard in which round that was counted, and in what way."""
    found = {}
    for line in (out / "audit.jsonl").read_text().splitlines():
        note = json.loads(line)
        if note["event"] == "counted":
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


class Overheard:
    """A node; what it is asked and answers is written down."""

    def __init__(self, node: Node, heard: list[tuple[bytes, bytes]]):
        self._node, self._heard = node, heard

    def answer(self, data: bytes) -> bytes:
        said = self._node.answer(data)
        self._heard.append((data, said))
        return said


def replayed(
    out: Path,
    homes: Sequence[Path],
    away: Mapping[int, Mapping[int, str]],
    into: Path,
    heard: list[tuple[bytes, bytes]] | None = None,
) -> list[dict[str, bytes]]:
    """What nodes with the same rows come to if these are away in these rounds.

    ``heard`` is given all messages, and the answers to them.
    """
    heard = [] if heard is None else heard
    run, places = into / "run", [into / home.name for home in homes]
    run.mkdir(parents=True)
    shutil.copy(out / "config.toml", run)
    nodes: dict[int, Any] = {}
    for client, (home, place) in enumerate(zip(homes, places, strict=True)):
        for file in ("node.toml", "policy.toml", "rows.npz"):
            place.mkdir(exist_ok=True)
            shutil.copy(home / file, place)
        node = node_of(load_as(Settings, place / "node.toml"))
        nodes[client] = Overheard(node, heard)
    box = Box(nodes)

    def spoil(client: int, data: bytes) -> list[bytes]:
        message = messages.read(data)
        if message.kind == "round" and client in away.get(message.round, ()):
            return [messages.write(message.answer("refused", reason="away"))]
        return [data]

    box.spoil = spoil
    lead(run, box, poll=0.0)
    return models(run, places)
