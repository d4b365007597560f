# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What one node says wrong costs that node its place in the round, and nothing else."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trials import COUNTS, Trial, apart, clock, forged, row

from fedblend_federation import message as messages
from fedblend_federation.server.checkpoint import ServerCheckpoint
from fedblend_federation.server.settings import BelowQuorum

_ = clock
BAD, GOOD = 1, (0, 2, 3)
RULES: dict[str, Any] = {
    "quorum": 0.5,
    "longest_update": 100.0,
    "largest_answer": 10_000,
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Callable[[], Path]:
    """A federation after its first round: made when it is first needed."""
    folder = tmp_path_factory.mktemp("begun") / "scaffold"

    def make() -> Path:
        if not folder.exists():
            Trial(folder, "scaffold", **RULES).run(rounds=1)
        return folder

    return make


def go_on(begun, folder: Path, spoil) -> tuple[Trial, Any]:
    """One round more, in which ``spoil`` has the replies of the bad client."""
    shutil.copytree(begun(), folder)
    trial = Trial(folder, "scaffold", **RULES)
    checkpoint = ServerCheckpoint(folder / "server")
    server = trial.restored(checkpoint)
    trial.transport.spoil = lambda at, data: (
        spoil(data) if at == 1000 + BAD and messages.decode(data).round == 1 else [data]
    )
    server.step()
    checkpoint.close()
    return trial, server


def changed(number: int | None = None, shape=None, drop=False, rename="", **head):
    """A reply that is another in one respect, with a right checksum."""

    def spoil(data: bytes) -> list[bytes]:
        header, metadata, body = apart(data)
        name, entry = next(iter(header.items()))
        begin, end = entry["data_offsets"]
        if number is not None:
            body[begin : begin + 4] = struct.pack("<I", number)
        if shape is not None:
            entry["shape"] = [*entry["shape"][::-1], 1][:shape]
        if rename:
            header[rename] = header.pop(name)
        if drop:
            header = {"w": {**entry, "data_offsets": [0, end - begin]}}
            body = body[begin:end]
        entry["dtype"] = head.pop("dtype", entry["dtype"])
        return [forged(header, {**metadata, **head}, body)]

    return spoil


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def flipped(data: bytes) -> list[bytes]:
    return [data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]]


FAULTS: dict[str, tuple[Callable, str, str]] = {
    "nan": (changed(bits(np.nan)), "rejected", "not finite"),
    "infinite": (changed(bits(-np.inf)), "rejected", "not finite"),
    "too long": (changed(bits(101.0)), "rejected", "at most 100 is allowed"),
    "far too long": (changed(bits(3e38)), "rejected", "at most 100 is allowed"),
    "turned shape": (changed(shape=2), "rejected", "expected float32"),
    "more dimensions": (changed(shape=3), "rejected", "expected float32"),
    "other dtype": (changed(dtype="I32"), "rejected", "expected float32"),
    "other name": (changed(rename="x"), "rejected", "is missing"),
    "long name": (changed(rename="é\n" * 500), "rejected", "is missing"),
    "names missing": (changed(drop=True), "rejected", "is missing"),
    "another round": (changed(round="0"), "stray", "round 0, late or replayed"),
    "a later round": (changed(round="2"), "stray", "round 2, late or replayed"),
    "another kind": (changed(kind="enroll"), "stray", "enroll of round 1, late"),
    "another client": (changed(client="2"), "stray", "a reply of client 2"),
    "no client": (changed(client="7"), "stray", "a reply of client 7"),
    "another experiment": (changed(experiment="other"), "stray", "late or replayed"),
    "a foreign refusal": (
        changed(experiment="other", kind="refused"),
        "stray",
        "refused of round 1, late or replayed",
    ),
    "a refusal": (
        changed(kind="refused", fields=json.dumps({"reason": "no\n" + 999 * "é"})),
        "refused",
        "no ?",
    ),
    "cut off": (lambda data: [data[:-5]], "rejected", "damaged"),
    "cut to its head": (lambda data: [data[:7]], "rejected", "damaged"),
    "flipped": (flipped, "rejected", "checksum"),
    "empty": (lambda data: [b""], "rejected", "damaged"),
    "too large": (lambda data: [data + bytes(10_000)], "rejected", "at most 10000"),
    "error": (lambda data: [None], "stray", "lost"),
}


@pytest.fixture(scope="module")
def without(begun, tmp_path_factory):
    """What the round comes to without that client."""
    found = {}

    def make():
        if not found:
            folder = tmp_path_factory.mktemp("without") / "run"
            found["it"] = go_on(begun, folder, lambda data: [])
        return found["it"]

    return make


@pytest.mark.parametrize("name", FAULTS)
def test_the_round_is_that_of_the_others(name, begun, without, tmp_path):
    spoil, event, reason = FAULTS[name]
    trial, server = go_on(begun, tmp_path / "run", spoil)
    reference, other = without()
    mine, theirs = trial.outcome(server), reference.outcome(other)
    for what in ("server", "bases", "states"):
        assert mine[what] == theirs[what]
    assert server.bases.tolist() == [1, 0, 1, 1]
    noted = [str(fields) for fields in trial.events(event)]
    assert any(f"'client': {BAD}" in line or f"client {BAD}" in line for line in noted)
    assert any(reason in line for line in noted)
    assert all(len(line) < 500 and "\\n" not in line for line in noted)
    assert server.interval["received"] == len(COUNTS) + len(GOOD)
    assert server.interval["rejected"] == int(event == "rejected")
    assert server.interval["dropped"] == int(event != "rejected")
    assert bool(server.exchanges.strays) == (event == "stray")


def test_the_same_reply_twice_counts_once(begun, tmp_path):
    trial, server = go_on(begun, tmp_path / "twice", lambda data: [data, data])
    once, other = go_on(begun, tmp_path / "once", lambda data: [data])
    assert trial.outcome(server) == once.outcome(other)


def test_a_reply_that_comes_a_round_late_is_discarded(tmp_path):
    late = []

    def spoil(at, data):
        if at != 1000 + BAD or messages.decode(data).kind != "round":
            return [data]
        late.append(data)
        now = messages.decode(data).round
        return [one for one in late if messages.decode(one).round < now]

    trial = Trial(tmp_path / "late", "apfl", **RULES)
    trial.transport.spoil = spoil
    server = trial.run()
    silent = Trial(tmp_path / "silent", "apfl", **RULES)
    silent.transport.spoil = lambda at, data: (
        [] if at == 1000 + BAD and messages.decode(data).kind == "round" else [data]
    )
    other = silent.run()
    assert trial.outcome(server)["server"] == silent.outcome(other)["server"]
    assert server.bases.tolist() == [2, -1, 2, 2]
    assert sum(server.exchanges.strays.values()) >= 2
    assert "round 0, late or replayed" in str(trial.events("stray"))


def test_a_third_of_the_nodes_may_fail_in_every_round(tmp_path, clock):
    trial = Trial(tmp_path, rounds=8, every=8, quorum=0.5)
    away: set[int] = set()
    trial.transport.spoil = lambda at, data: (
        [] if at in away and messages.decode(data).kind == "round" else [data]
    )
    server = trial.server()
    while not server.done:
        away = {1000 + (server.round + k) % 4 for k in range(1 + server.round % 2)}
        before = clock.now
        server.step()
        assert clock.now - before <= 1 + trial.rules.timeouts.deadline
    assert (server.records[-1].received, server.records[-1].dropped) == (20, 12)


@pytest.mark.parametrize("name", ["fedavg", "apfl"])
def test_below_the_quorum_nothing_is_lost(name, tmp_path):
    whole = Trial(tmp_path / "whole", name)
    wanted = whole.outcome(whole.run())
    trial = Trial(tmp_path / "trial", name, quorum=0.75)
    trial.run(rounds=1)
    before = (trial.folder / "server" / "checkpoint").read_bytes()
    nodes = dict(trial.transport.nodes)
    for client in (0, 3):
        del trial.transport.nodes[1000 + client]
    with pytest.raises(BelowQuorum) as caught:
        trial.run()
    assert str(caught.value) == (
        "round 1: 2 of 4 clients replied, the quorum is 3; "
        "client 0 silent; client 3 silent"
    )
    assert (trial.folder / "server" / "checkpoint").read_bytes() == before
    trial.transport.nodes = nodes
    found = trial.outcome(trial.run())
    assert {**found, "ledger": 0} == {**wanted, "ledger": 0}


def test_below_the_quorum_the_same_server_can_go_on(tmp_path):
    whole = Trial(tmp_path / "whole", "scaffold")
    wanted = whole.outcome(whole.run())
    trial = Trial(tmp_path / "trial", "scaffold")
    server, silent = trial.server(), {1002}
    trial.transport.spoil = lambda at, data: (
        [] if at in silent and messages.decode(data).kind == "round" else [data]
    )
    failed = 0
    while not server.done:
        round, records = server.round, [row(record) for record in server.records]
        try:
            server.step()
            silent = {1002}
        except BelowQuorum:
            assert (server.round, [row(r) for r in server.records]) == (round, records)
            failed, silent = failed + 1, set()
    assert failed == 3
    found = trial.outcome(server)
    assert found["server"] == wanted["server"] and found["states"] == wanted["states"]
