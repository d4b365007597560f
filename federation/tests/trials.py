# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Small federations in one process that compile once, and what there is to compare."""

import hashlib
import json
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import pytest

import fedblend as fb
import problems
from fedblend.simulation.serialize import pack
from fedblend_federation.client.executor import Executor
from fedblend_federation.client.node import Node
from fedblend_federation.server.checkpoint import ServerCheckpoint
from fedblend_federation.server.coordinator import Coordinator
from fedblend_federation.transport import Timeouts, exchange
from loopback import EXPERIMENT, LoopbackFederation

COUNTS = (3, 1, 4, 2)
ROUNDS = 3
TIMEOUTS = Timeouts(deadline=10.0, resend=4.0, pause=1.0, poll=1.0)
_BUILD = {
    "fedavg": fb.fedavg,
    "apfl": partial(fb.apfl, alpha=0.5),
    "scaffold": fb.scaffold,
}
_COMPILED = ("_tell", "_deploy")
_COMPILED_SUMS = ("_add", "_step", "_inspect_join", "_inspect_update")


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    """Servers wait by this clock: a file that imports it does not wait."""
    found = Clock()
    waiting = partial(exchange, clock=found, sleep=found.sleep)
    monkeypatch.setattr("fedblend_federation.server.collection.exchange", waiting)
    # Whoever is killed leaves what it has written to the system, synced or not.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    return found


@cache
def problem() -> problems.Problem:
    return problems.classes(COUNTS)


@cache
def algorithm(name: str):
    return _BUILD[name](problem().loss, fb.Work(0.2, steps=2, batch_size=2))


@cache
def _compiled(name: str) -> dict[Any, Any]:
    return {}


class Trial(LoopbackFederation):
    """A federation of four; nodes and servers of one method share what is compiled."""

    def __init__(self, folder: Path, name: str = "fedavg", **rules: Any):
        self.name, on = name, problem()
        chosen = {"rounds": ROUNDS, "cohort": 4, "every": ROUNDS, **rules}
        chosen.setdefault("timeouts", TIMEOUTS)
        super().__init__(
            algorithm(name),
            on.params,
            on.federated_data,
            jax.random.key(0),
            folder,
            **chosen,
        )

    def node(self, client: int) -> Node:
        node, built = super().node(client), _compiled(self.name)
        permissions = node.permissions()

        def executor(terms) -> Executor:
            if client not in built:
                built[client] = permissions.executor(terms)
            return built[client]

        own = permissions._replace(executor=executor)
        node.permissions = lambda: own
        return node

    def server(self) -> Coordinator:
        server, built = super().server(), _compiled(self.name)
        if "server" not in built:
            built["server"] = server
        first = built["server"]
        for name in _COMPILED:
            setattr(server, name, getattr(first, name))
        for name in _COMPILED_SUMS:
            setattr(server.aggregator, name, getattr(first.aggregator, name))
        server.engine.programs.compiled = built["server"].engine.programs.compiled
        return server

    def events(self, kind: str) -> list[dict]:
        return [fields for event, fields in self.notes if event == kind]

    def restored(self, checkpoint: ServerCheckpoint) -> Coordinator:
        """A server that goes on from the checkpoint."""
        server, saved = self.server(), checkpoint.read()
        if saved is not None:
            saved.restore(server)
        return server

    def run(self, rounds: int | None = None) -> Coordinator:
        """From the checkpoint to the end, as a process of its own would."""
        checkpoint = ServerCheckpoint(self.folder / "server")
        try:
            server = self.restored(checkpoint)
            while not server.done and server.round != rounds:
                server.step()
                checkpoint.save(server, {})
            return server
        finally:
            checkpoint.close()

    def state(self, client: int, round: int) -> Path:
        return self.folder / f"node{client}" / EXPERIMENT / f"state-{round}"

    def outcome(self, server: Coordinator) -> dict[str, Any]:
        """All that a federation comes to, as bytes; times are left out."""
        places = [self.folder / f"node{c}" / EXPERIMENT for c in range(len(COUNTS))]
        return {
            "server": pack((server.down, server.server)),
            "ledger": pack(server.ledger.snapshot()),
            "records": [row(record) for record in server.records],
            "bases": server.bases.tolist(),
            "states": [
                (place / f"state-{base}").read_bytes()
                for place, base in zip(places, server.bases, strict=True)
            ],
            "models": [
                (place / "personal.safetensors").read_bytes() for place in places
            ],
        }


def row(record) -> dict[str, Any]:
    return {k: repr(v) for k, v in record.row().items() if k != "seconds"}


def apart(data: bytes) -> tuple[dict, dict, bytearray]:
    """Header, metadata and body of a message or a file."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__")
    metadata.pop("sha256")
    return header, metadata, bytearray(data[end:])


def forged(header: dict, metadata: dict, body: bytes | bytearray) -> bytes:
    """Bytes with a right checksum, whatever is in them."""
    covered = json.dumps([metadata, header]).encode() + bytes(body)
    signed = {**metadata, "sha256": hashlib.sha256(covered).hexdigest()}
    text = json.dumps({"__metadata__": signed, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)
