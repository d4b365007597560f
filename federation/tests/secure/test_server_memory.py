# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Neither memory nor disk of a server with secure sums has a single client's answer.

The server is a process of its own. Before the last answer of a round comes, when it
asks nodes to open a sum, and at its end, all of its memory is searched for what the
nodes computed, as they encode it.
"""

import os
import subprocess
import sys
import time
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import pytest
from federations import CLIENTS, problem
from server_process import federation

from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.secure.flatten import FixedPoint
from loopback import EXPERIMENT

BLOCK = 1 << 20
ZEROS = bytes(BLOCK)
ENTRIES = 4
"""Numbers in a row that are searched for: 16 bytes of float32 are no coincidence."""
LATE = 6
"""A client that is gone when it should answer in round 1; its answer comes too late."""


def answer(folder: Path, client: int, round: int) -> np.ndarray:
    """The largest array of what a node computed in a round, from its own disk."""
    place = folder / f"node{client}" / EXPERIMENT
    record = states.read_record(place, f"masked-{round}")
    if record is not None:
        return np.frombuffer(record.data, record.about["dtype"])[
            : problem().params.weight.size
        ]
    record = states.read_record(place, f"reply-{round}")
    assert record is not None
    arrays = messages.decode(record.data).arrays.values()
    return max((array.ravel() for array in arrays), key=len)


def patterns(folder: Path, weights: np.ndarray) -> dict[str, bytes]:
    """The bytes of all answers that are on the nodes' disks."""
    found = {}
    for client in range(CLIENTS):
        for round in states.rounds(folder / f"node{client}" / EXPERIMENT):
            if round < 0:
                continue
            own = answer(folder, client, round)
            start = int(np.argmax(np.abs(own[: len(own) - ENTRIES + 1])))
            some = own[start : start + ENTRIES]
            assert np.count_nonzero(some) == ENTRIES
            weight = weights[client] / weights.max()
            whole = FixedPoint(64, 65536.0, CLIENTS).encode(own, weight)
            name = f"client {client} round {round}"
            found[f"{name} float32"] = some.astype(np.float32).tobytes()
            found[f"{name} float64"] = some.astype(np.float64).tobytes()
            found[f"{name} fixed"] = whole[start : start + ENTRIES].tobytes()
    return found


def found_in(data: bytes, wanted: dict[str, bytes]) -> set[str]:
    return {name for name, pattern in wanted.items() if pattern in data}


def in_memory(pid: int, wanted: dict[str, bytes]) -> set[str]:
    """Which patterns are anywhere in the memory that a process can write to."""
    found = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            place, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            start, end = (int(edge, 16) for edge in place.split("-"))
            for place in range(start, end, BLOCK):
                try:
                    memory.seek(place)
                    # Blocks overlap by more than a pattern.
                    data = memory.read(min(BLOCK + 4096, end - place))
                except (OSError, ValueError, OverflowError):
                    break
                if data[:BLOCK] != ZEROS:
                    found |= found_in(data, wanted)
    return found


def on_disk(folder: Path, wanted: dict[str, bytes]) -> set[str]:
    found = set()
    for path in folder.rglob("*"):
        if path.is_file():
            found |= found_in(path.read_bytes(), wanted)
    return found


def seen_by_the_server(folder: Path, kind: str) -> tuple[set[str], int]:
    """Which answers of clients a server has had, and how many there were."""
    made, home = federation(folder, kind), folder / "server"
    weights = made.federation.train.counts.astype(float)
    weights = np.minimum(weights, 3 * np.median(weights))
    seen, looked = set(), set()
    here = Path(__file__).parent
    paths = [here, here.parent, here.parents[1], *map(Path, sys.path)]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths))}
    with Listener(str(folder / "socket"), family="AF_UNIX") as listener:
        command = [sys.executable, str(here / "server_process.py")]
        process = subprocess.Popen(
            [*command, str(folder / "socket"), str(folder), kind], env=environment
        )
        try:
            connection, wanted, late = listener.accept(), {}, []
            while data := connection.recv_bytes():
                address = int.from_bytes(data[:8], "little")
                message = messages.decode(data[8:])
                first = (message.kind, message.round) not in looked
                looked.add((message.kind, message.round))
                last = message.kind == "round" and message.client == CLIENTS - 1
                if last:
                    time.sleep(1.0)  # the server takes up the answers before
                if last or (message.kind == "unmask" and first):
                    wanted |= patterns(folder, weights)
                    seen |= in_memory(process.pid, wanted) | on_disk(home, wanted)
                    if late:
                        connection.send_bytes(late.pop())
                reply = data[:8] + made.nodes[address].reply(data[8:])
                if (message.kind, message.round, message.client) == ("round", 1, LATE):
                    late.append(reply)
                    reply = data[:8]
                connection.send_bytes(reply)
            wanted |= patterns(folder, weights)
            seen |= in_memory(process.pid, wanted) | on_disk(home, wanted)
            connection.send_bytes(b"")
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    return seen, len(wanted)


@pytest.mark.slow
def test_a_server_with_secure_sums_has_no_single_answer(tmp_path):
    seen, wanted = seen_by_the_server(tmp_path, "secure")
    assert not seen and wanted == 3 * 2 * CLIENTS


@pytest.mark.slow
def test_a_server_without_them_has_all_and_the_search_finds_them(tmp_path):
    seen, wanted = seen_by_the_server(tmp_path, "plain")
    assert wanted == 3 * 2 * CLIENTS
    assert seen >= {
        f"client {client} round {round} float32"
        for client in range(CLIENTS - 1)
        for round in range(2)
        if client != LATE
    }
