# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Many wrong bytes wherever bytes are read: messages, files of servers and nodes."""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from trials import Trial, apart, clock, forged

from fedblend.errors import CheckpointError
from fedblend.simulation.serialize import WireError
from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.message import Message
from fedblend_federation.server.checkpoint import ServerCheckpoint
from loopback import EXPERIMENT

_ = clock


@contextmanager
def nothing_runs(folder: str) -> Iterator[None]:
    """No code is run and no file opened elsewhere while bytes are decoded."""
    watched = [True]

    def watch(event: str, arguments: tuple) -> None:
        if not watched[0]:
            return
        banned = ("exec", "compile", "os.system", "os.exec", "subprocess", "import",
                  "pickle", "ctypes", "socket.connect", "shutil")  # fmt: skip
        outside = event == "open" and not str(arguments[0]).startswith(folder)
        if outside or event.startswith(banned):
            watched.append(f"{event} {arguments}"[:200])  # type: ignore[arg-type]

    sys.addaudithook(watch)
    try:
        yield
    finally:
        watched[0] = False
    assert watched[1:] == []


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes with something wrong; in half of the cases the checksum is right."""
    if rng.random() < 0.5:
        wrong = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(wrong)) if wrong else 0
            end = at + rng.choice((0, 1, 1, 8))
            wrong[at:end] = rng.randbytes(rng.choice((0, 1, 1, 8)))
        return bytes(wrong)
    header, metadata, body = apart(data)
    where = rng.choice((header, metadata, metadata))
    name = rng.choice([*where, "x"])
    odd = (
        None,
        0,
        -1,
        1e999,
        "",
        "٣",
        [],
        {},
        [[]],
        10**40,
        True,
        "\ud800",
        "0",
        {"a": 1},
    )
    value = rng.choice(odd)
    if where is header and name != "x" and rng.random() < 0.8:
        header[name][rng.choice(("dtype", "shape", "data_offsets"))] = value
    elif where is metadata and name != "x" and rng.random() < 0.5:
        metadata[name] = _mutated_text(str(metadata[name]), rng, value)
    else:
        where[name] = value
    return forged(header, metadata, body)


def _mutated_text(text: str, rng: random.Random, value) -> str:
    """A word of it replaced by an odd value."""
    found = list(re.finditer(r'-?[0-9.]+|"[^"]*"|\[[^\[\]]*\]', text))
    if not found:
        return text[: len(text) // 2]
    word = rng.choice(found)
    return text[: word.start()] + json.dumps(value) + text[word.end() :]


Reader = tuple[bytes, Callable[[bytes], object], type[Exception]]


def _readers(folder) -> dict[str, Reader]:
    """What is read from others or from disk: bytes, how, and what it may raise."""
    trial = Trial(folder, "scaffold")
    trial.run(rounds=1)
    node, place = trial.transport.nodes[1001], folder / "node1" / EXPERIMENT
    executor, server = node.permissions().executor({}), trial.server()

    def of_file(path, read):
        def read_file(data: bytes):
            path.write_bytes(data)
            return read()

        return path.read_bytes(), read_file

    def checkpoint():
        opened = ServerCheckpoint(folder / "server")
        (folder / "server" / "checkpoint.previous").unlink(missing_ok=True)
        try:
            saved = opened.read()
            return saved is not None and saved.restore(server)
        finally:
            opened.close()

    def state():
        return states.read_state(place, 0, executor.state)

    template = (server.shapes.up, ())
    message = Message("round", EXPERIMENT, 1, 0, fields={"asked": False})
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), template)
    up = messages.encode(message, zeros)

    def payload(data: bytes):
        return messages.payload_of(messages.decode(data), template)

    return {
        "message": (up, messages.decode, WireError),
        "up": (up, payload, WireError),
        "checkpoint": (
            *of_file(folder / "server" / "checkpoint", checkpoint),
            CheckpointError,
        ),
        "state": (*of_file(place / "state-0", state), WireError),
        "terms": (
            *of_file(place / "terms.json", lambda: states.read_terms(place)),
            WireError,
        ),
    }


def _fuzz(folder, times: int) -> None:
    readers, rng = _readers(folder), random.Random(0)
    with nothing_runs(str(folder)):
        for name, (data, read, error) in readers.items():
            wrong = 0
            for _ in range(times):
                plain = name == "terms"
                try:
                    read(_flipped(data, rng) if plain else mutated(data, rng))
                except error as caught:
                    assert type(caught) is error and "\n" not in str(caught)
                    wrong += 1
            assert wrong > times / 2, name


def _flipped(data: bytes, rng: random.Random) -> bytes:
    text = data.decode()
    odd = rng.choice((None, 0, "٣", [], {}, [["a", 1]], 10**40))
    return (
        _mutated_text(text, rng, odd).encode()
        if rng.random() < 0.5
        else data[: rng.randrange(len(data))]
    )


def test_wrong_bytes_are_refused(tmp_path):
    _fuzz(tmp_path / "fuzzed", 1000)


@pytest.mark.slow
def test_a_hundred_thousand_wrong_bytes_are_refused(tmp_path):
    _fuzz(tmp_path / "fuzzed", 20_000)


def test_a_node_refuses_any_bytes(tmp_path):
    trial, rng = Trial(tmp_path, "scaffold"), random.Random(1)
    trial.run(rounds=1)
    node, server = trial.transport.nodes[1001], trial.server()
    zeros = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), server.shapes.message
    )
    told = zeros._replace(round=None)
    kinds = [
        messages.encode(
            Message(kind, EXPERIMENT, 1, 1, base=0, fields={"last": 1}), told
        )
        for kind in messages.KINDS
    ]
    refused = 0
    for turn in range(500):
        data = mutated(kinds[turn % len(kinds)], rng)
        answer = messages.decode(node.reply(data))
        assert answer.client == 1
        if answer.kind == "refused":
            refused += 1
            assert re.fullmatch(r"[ -~]{1,250}", answer.fields["reason"])
    assert refused > 250
