# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Servers that lie at random: whatever they tell nodes, no sum of few is open.

Two kinds of them. One runs attempts of its own, with members, rounds, models and
sets as it likes, and tells some nodes something else. The other is the shipped server,
with somebody between it and the nodes who changes, repeats, drops and swaps messages.
What either could read of all replies is computed by ``attacker``.
"""

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from attacker import Attacker, leaks, made_of_few
from federations import (
    DroppingTransport,
)
from liars import TERMS, Liar, TermsFederation, forge, some_of
from trials import apart, clock, forged

from fedblend.errors import InputError
from fedblend_federation.secure import client as secure_client
from fedblend_federation.secure import server as secure_server
from fedblend_federation.secure.flatten import FixedPoint
from fedblend_federation.secure.session import Attempt, View, digest_of, unmask
from fedblend_federation.server.settings import BelowQuorum

_ = clock
LIES = 400


class Between(DroppingTransport):
    """Between the shipped server and its nodes: spoils what goes either way."""

    def __init__(self, attacker: Attacker, rng: random.Random, lying: float):
        super().__init__(attacker.federation.nodes, {})
        self.attacker, self.rng, self.lying, self.lies = attacker, rng, lying, 0
        self.old: list[tuple[int, bytes]] = []
        self.digests: dict[Any, str] = {}

    def send(self, outgoing: Mapping[int, bytes]) -> None:
        rng, lie, seed = self.rng, "", self.rng.random()
        sent = [(address, self._with_terms(data)) for address, data in outgoing.items()]
        if rng.random() < self.lying:
            self.lies += 1
            lie = rng.choice(["forge"] * 5 + ["drop", "repeat", "swap", "replay"])
        some = some_of([address for address, _ in sent], rng)
        if lie == "swap":
            rng.shuffle(sent)
            others = [data for _, data in reversed(sent)]
            sent = [
                (at, _for_client(other, at - 1000) if at in some else data)
                for (at, data), other in zip(sent, others, strict=True)
            ]
        if lie == "replay" and self.old:
            sent += rng.sample(self.old, min(3, len(self.old)))
        for address, data in sent:
            if address in some and lie == "forge":
                data = forge(data, random.Random(seed))
            if address in some and lie == "drop":
                continue
            for _ in range(2 if address in some and lie == "repeat" else 1):
                self.old.append((address, data))
                reply = self.attacker.ask(address - 1000, data)
                self.waiting.append((address, self._as_if_all_agreed(reply)))

    def _with_terms(self, data: bytes) -> bytes:
        header, metadata, body = apart(data)
        if metadata["kind"] == "enroll":
            metadata["fields"] = json.dumps(TERMS)
        return forged(header, metadata, body)

    def _as_if_all_agreed(self, data: bytes) -> bytes:
        header, metadata, body = apart(data)
        fields = json.loads(metadata["fields"])
        if metadata["kind"] == "share":
            fields["attempt"] = self.digests.setdefault(
                (metadata["round"], fields["attempt"][:0]), fields["attempt"]
            )
        return forged(header, {**metadata, "fields": json.dumps(fields)}, body)


def _for_client(data: bytes, client: int) -> bytes:
    header, metadata, body = apart(data)
    return forged(header, {**metadata, "client": str(client)}, body)


def between(
    folder: Path, seed: int, monkeypatch: Any, lying: float = 0.3
) -> tuple[Between, int, list[np.ndarray]]:
    """A run of the shipped server, and the sums that its own code has opened."""
    rng, opened = random.Random(seed), []
    least, cohort = rng.choice([3, 4]), rng.choice([4, 5, 8])
    rules = {"rounds": 2, "cohort": cohort, "quorum": 0.5}
    federation = TermsFederation(folder, least, 0, **rules)
    attacker = Attacker(federation)
    transport = Between(attacker, rng, lying)
    federation.transport = transport

    def seen(total: np.ndarray, graph: Any, *others: Any) -> np.ndarray:
        found = unmask(total, graph, *others)
        opened.append(FixedPoint(64, 65536.0, len(graph.holders)).decode(found))
        return found

    monkeypatch.setattr(secure_server, "unmask", seen)
    server = federation.server()
    for _ in range(3):
        with suppress(InputError, BelowQuorum):
            federation.complete(server)
            break
    return transport, least, opened


def found_by_server(
    opened: list[np.ndarray], attacker: Attacker, least: int
) -> list[str]:
    """Sums that the shipped server has opened and a few clients make up."""
    lines = []
    for value in opened:
        for attempt in {one.attempt for one in attacker.answers.values()}:
            some = [a for a in attacker.answers.values() if a.attempt == attempt]
            found = made_of_few(value, some, least)
            lines += [f"the server has a sum of {few}" for few in found]
    return lines


class Trial(NamedTuple):
    """What the lies of a trial came to."""

    lies: int
    sums: int
    found: list[str]


def trials(folder: Path, monkeypatch: Any, first: int = 0) -> Iterator[Trial]:
    """One after the other; every fourth has the shipped server."""
    for seed in count(first):
        place = folder / str(seed)
        if seed % 4 == 0:
            one, least, opened = between(place, seed, monkeypatch)
            found = one.attacker.sums()
            lines = found_by_server(opened, one.attacker, least)
        else:
            one = Liar(place, seed)
            found, lines, least = one.run(), [], one.least
        lines += leaks(found, least) + one.attacker.faults
        yield Trial(one.lies, len(found), [f"seed {seed}: {line}" for line in lines])


def until(lies: int, trials: Iterator[Trial]) -> list[Trial]:
    """Trials with so many lies, or one that found something."""
    done: list[Trial] = []
    while sum(one.lies for one in done) < lies and not any(o.found for o in done):
        done.append(next(trials))
    return done


@pytest.mark.parametrize("lies", [40, pytest.param(LIES, marks=pytest.mark.slow)])
def test_no_sum_that_a_liar_reads_is_of_few_clients(lies, tmp_path, monkeypatch):
    done = until(lies, trials(tmp_path, monkeypatch))
    assert [line for one in done for line in one.found] == []
    assert sum(one.sums for one in done) > len(done) / 4


def test_without_lies_the_sum_of_all_is_read_and_no_other(tmp_path, monkeypatch):
    """The attacker reads what there is to read: it would see more, if it could."""
    liar = Liar(tmp_path / "own", 1, most=0.0)
    found = liar.run()
    assert found and leaks(found, liar.least) == []
    for one in found:
        own = np.sum([answer.plain for answer in one.answers], axis=0)
        np.testing.assert_allclose(one.value, own, atol=1e-9)
        assert len(one.answers) >= liar.least and np.abs(own).max() > 1e-3
    transport, least, opened = between(tmp_path / "server", 2, monkeypatch, 0.0)
    read = transport.attacker.sums()
    assert len(read) == len(opened) == 2 and transport.lies == 0
    mine, theirs = sorted(one.value.tolist() for one in read), sorted(map(list, opened))
    np.testing.assert_allclose(mine, theirs, atol=1e-9)
    assert leaks(read, least) == []


def _digest_without_terms(attempt: Attempt) -> bytes:
    keys = [(client, attempt.keys[client].hex()) for client in attempt.members]
    about = attempt.experiment, attempt.round, attempt.number, keys
    return digest_of(*about, tuple(attempt.fixed_point))


def _digest_without_model(view: View, attempt: bytes) -> bytes:
    return digest_of(attempt.hex(), sorted(view.nonces.items()), view.largest)


def _digest_without_largest(view: View, attempt: bytes) -> bytes:
    return digest_of(attempt.hex(), sorted(view.nonces.items()), view.broadcast)


def _encode_zeros(encoding: FixedPoint, values: np.ndarray, weight: float) -> Any:
    """Zeros in the place of numbers that were shrunk."""
    fits = np.abs(values * weight).max() < encoding.clip * (1 - 1e-9)
    return _ENCODE(encoding, values * fits, weight)


_ENCODE = FixedPoint.encode


def _nothing(*arguments: Any) -> None:
    del arguments


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (Attempt, "digest", property(_digest_without_terms)),
        (secure_client, "refuse_near", _nothing),
        pytest.param(View, "digest", _digest_without_model, marks=pytest.mark.slow),
        pytest.param(View, "digest", _digest_without_largest, marks=pytest.mark.slow),
        pytest.param(FixedPoint, "encode", _encode_zeros, marks=pytest.mark.slow),
        pytest.param(secure_client, "_check_nodes", _nothing, marks=pytest.mark.slow),
    ],
)
def test_a_defense_that_is_gone_is_missed(where, name, broken, tmp_path, monkeypatch):
    monkeypatch.setattr(where, name, broken)
    done = until(10 * LIES, trials(tmp_path, monkeypatch))
    assert done[-1].found
