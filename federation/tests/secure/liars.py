# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Servers that run attempts of their own, and lie to some nodes at random."""

import base64
import json
import math
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from attacker import Attacker, Sum
from federations import (
    CLIENTS,
    SecureFederation,
    problem,
)
from trials import apart, forged

import fedblend as fb
from fedblend_federation import message as messages
from fedblend_federation.client import state
from fedblend_federation.client.executor import ClientSetup, Executor
from fedblend_federation.message import ENROLLED, Message
from fedblend_federation.policy.policy import Refusal
from fedblend_federation.secure.client import Means
from fedblend_federation.secure.flatten import coarse

TERMS = {
    "rate": 0.2,
    "clip": 65536.0,
    "bits": 64,
    "weights": "by_count",
    "capacities": {"train": 7},
    "rates": [0.1, 0.2],
    "preprocessing": {"mean": [0.0], "scale": [1.0]},
}
"""What nodes compute with, in the place of a configuration."""
ALLOWED: dict[str, Callable[[Any], bool]] = {
    "rate": lambda value: value in (0.2, 1e-30),
    "clip": lambda value: type(value) is float and 1e-12 < value < 1e12,
    "bits": lambda value: value in (32, 64),
    "weights": lambda value: value in ("by_count", "uniform"),
}
TOLD = {
    "rate": [1e-30],
    "clip": [1e-9, 0.03, 0.1, 0.3],
    "bits": [32],
    "weights": ["uniform"],
}
"""Terms that nodes accept, too."""


@cache
def _executor(client: int, rate: float, build: Callable[[], ClientSetup]) -> Executor:
    return Executor(build()._replace(algorithm=_algorithm(rate)))


@cache
def _algorithm(rate: float) -> Any:
    return fb.fedavg(problem().loss, fb.Work(rate, steps=1, batch_size=None))


class TermsFederation(SecureFederation):
    """Nodes compute as their terms say; all their rows, so that updates repeat."""

    def __init__(self, folder: Path, least: int, colluding: int, **rules: Any):
        secure = {"least": least + colluding, "colluding": colluding}
        super().__init__(folder, secure=secure, **rules)
        self.algorithm = _algorithm(0.2)

    def node(self, client: int) -> Any:
        node = super().node(client)
        permissions = node.permissions()
        setup = cache(lambda: permissions.executor({}).setup)
        _BUILDS.setdefault(client, setup)

        def executor(terms: Mapping[str, Any]) -> Executor:
            _check(terms)
            return _executor(client, terms["rate"], _BUILDS[client])

        own = permissions._replace(
            executor=executor, secure=lambda terms: self._means(client, terms)
        )
        node.permissions = lambda: own
        return node

    def _means(self, client: int, terms: Mapping[str, Any]) -> Means:
        _check(terms)
        chosen = {key: terms[key] for key in ("clip", "bits", "weights")}
        return self.means(client)._replace(**chosen)

    def means_of(self, client: int, request: Message) -> Means:
        """Those that a node has in an experiment."""
        place = self.folder / f"node{client}" / request.experiment
        return self._means(client, state.read_terms(place))

    def rows_of(self, client: int, means: Means) -> float:
        """The weight of a client, as its own terms say."""
        counts = coarse(problem().federated_data.train.counts)
        return 1.0 if means.weights == "uniform" else float(counts[client])


_BUILDS: dict[int, Callable[[], ClientSetup]] = {}


def _check(terms: Mapping[str, Any]) -> None:
    for key, allowed in ALLOWED.items():
        if not allowed(terms.get(key)):
            raise Refusal(f"policy: {key} is {terms.get(key)!r}")


def changed(value: Any, rng: random.Random) -> Any:
    """The same with another leaf, or another list."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        options = TOLD.get(key, [])
        other = rng.choice(options) if options and rng.random() < 0.7 else None
        return {**value, key: changed(value[key], rng) if other is None else other}
    if isinstance(value, list) and value:
        at, other = rng.randrange(len(value)), rng.randrange(len(value))
        swapped = list(value)
        swapped[at], swapped[other] = value[other], value[at]
        within = [*value[:at], changed(value[at], rng), *value[at + 1 :]]
        fewer = value[:at] + value[at + 1 :]
        return rng.choice([within, within, fewer, fewer, [*value, value[at]], swapped])
    if isinstance(value, int | float) and not isinstance(value, bool):
        others = [0, -1, value + 1, value - 1, value * 2, value * 1e-30, 1e300, "1"]
        return rng.choice(others)
    return rng.choice([None, "", "0" * 64, 3, [], {}, [[]], value])


def forge(data: bytes, rng: random.Random) -> bytes:
    """A message with a random part of it changed, and a right checksum."""
    header, metadata, body = apart(data)
    what = rng.choice(["fields"] * 5 + ["numbers", "model", "model"])
    if what == "fields":
        fields = changed(json.loads(metadata["fields"]), rng)
        metadata["fields"] = json.dumps(fields if isinstance(fields, dict) else {})
    elif what == "numbers":
        key = rng.choice(["round", "base", "attempt", "client", "kind", "experiment"])
        if key == "kind":
            metadata[key] = rng.choice(messages.KINDS)
        elif key == "experiment":
            metadata[key] = rng.choice(["one", "two", "trial"])
        else:
            metadata[key] = str(max(int(metadata[key]) + rng.choice([-1, 1, 2]), -2))
    elif body:
        numbers = np.frombuffer(bytes(body[: len(body) // 4 * 4]), np.float32)
        spoiled = _spoiled(numbers, rng).tobytes()
        body = bytearray(spoiled + bytes(body[len(spoiled) :]))
    return forged(header, metadata, body)


def _spoiled(numbers: np.ndarray, rng: random.Random) -> np.ndarray:
    one = np.zeros_like(numbers)
    one[rng.randrange(one.size)] = 1e-3
    with np.errstate(all="ignore"):
        times = [numbers * np.float32(x) for x in (0, -1, 1e3, 1e30, math.nan)]
    return rng.choice([*times, numbers + one])


def some_of(clients: list[int], rng: random.Random) -> set[int]:
    """One of them, all but one, all, or any number."""
    most = len(clients)
    some = rng.choice([1, max(most - 1, 1), most, rng.randint(1, most)])
    return set(rng.sample(clients, some))


class Liar:
    """Runs attempts of its own, and lies to some nodes, at random."""

    def __init__(self, folder: Path, seed: int, most: float = 0.5):
        self.rng, self.lies = random.Random(seed), 0
        self.lying = lying = most * self.rng.random()
        self.least = self.rng.choice([3, 3, 4])
        colluding = self.rng.choice([0, 0, 1]) if lying else 0
        self.federation = TermsFederation(folder, self.least, colluding)
        some = self.rng.sample(range(CLIENTS), colluding)
        self.attacker = Attacker(self.federation, some)
        self.clients = sorted({*self.rng.sample(range(CLIENTS), 5), *some})
        self.numbers: dict[tuple[str, int], int] = {}
        self.sent: list[tuple[int, bytes]] = []
        draw = np.random.default_rng(seed)
        template = _executor(0, 0.2, _BUILDS[0]).message._replace(round=None)
        self.model = jax.tree.map(
            lambda leaf: draw.standard_normal(leaf.shape).astype(leaf.dtype), template
        )

    def run(self, attempts: int = 4) -> list[Sum]:
        """All that the liar can read after so many attempts."""
        for name in ("one", "two"):
            self._enroll(name)
        for _ in range(attempts):
            self._attempt()
            if self._lies() and self.sent:
                self._ask(*self.rng.choice(self.sent))  # again, or late
            if self._lies() and self.rng.random() < 0.5:
                self._forget(self.rng.choice(["one", "two"]))
        return self.attacker.sums()

    def _lies(self) -> bool:
        """Whether to lie now; counted."""
        found = self.rng.random() < self.lying
        self.lies += found
        return found

    def _ask(self, client: int, data: bytes) -> Message | None:
        self.sent.append((client, data))
        return messages.decode(self.attacker.ask(client, data))

    def _tell(
        self,
        clients: list[int],
        kind: str,
        build: Callable[[int, dict[str, Any]], bytes],
    ) -> dict[int, Message]:
        """Ask all; some of them get what a lie makes of the words, or of the bytes."""
        some, twist = set[int](), dict[str, Any]()
        seed, bytewise = self.rng.random(), self.rng.random() < 0.3
        if self._lies():
            some = some_of(clients, self.rng)
            twist = {} if bytewise else self._twist(kind, clients)
        found, order = {}, list(clients)
        self.rng.shuffle(order)
        for client in order:
            data = build(client, twist if client in some else {})
            if bytewise and client in some:  # the same change for all of them
                data = forge(data, random.Random(seed))
            reply = self._ask(client, data)
            if reply is not None and reply.kind == kind:
                found[client] = reply
        return dict(sorted(found.items()))

    def _twist(self, kind: str, clients: list[int]) -> dict[str, Any]:
        """Something else than what all others are told."""
        rng, left = self.rng, self.rng.choice(clients)
        fewer = [one for one in clients if one != left]
        about = {
            "members": fewer,
            "number": rng.randrange(4),
            "round": rng.randrange(3),
            "experiment": rng.choice(["one", "two"]),
        }
        words = {"sharing": fewer}
        key = rng.choice(sorted(TOLD))
        allowed = {**TERMS, key: rng.choice(TOLD[key])}
        options = {
            "enroll": {
                "terms": rng.choice([allowed, allowed, changed(TERMS, rng)]),
                "params": self._other_model(),
            },
            "share": about,
            "round": {
                **(about | words),
                "largest": rng.choice([1.0, 4.0, 1e9]),
                "model": self._other_model(),
                "missed": "11",
            },
            "unmask": {**(about | words), "answered": fewer},
        }[kind]
        keys = rng.sample(sorted(options), rng.choice([1, 1, 2]))
        return {key: options[key] for key in keys}

    def _other_model(self) -> Any:
        def other(leaf: np.ndarray) -> np.ndarray:
            return _spoiled(leaf.ravel(), self.rng).reshape(leaf.shape)

        return jax.tree.map(other, self.model)

    def _enroll(self, name: str) -> None:
        params = problem().params

        def build(client: int, twist: dict[str, Any]) -> bytes:
            terms = twist.get("terms", TERMS)
            head = Message("enroll", name, client, fields=terms)
            other = twist["params"].shared if "params" in twist else params
            return messages.encode(head, other)

        self._tell(self.clients, "enroll", build)

    def _forget(self, name: str) -> None:
        """Some nodes were told to stop, other experiments took the place of this."""
        for client in self.rng.sample(self.clients, self.rng.randint(1, 5)):
            place = self.federation.folder / f"node{client}" / name
            self._ask(client, messages.encode(Message("stop", name, client)))
            if place.exists():
                state.remove_experiment(place)
        self._enroll(name)

    def _attempt(self) -> None:
        rng, name = self.rng, self.rng.choice(["one", "two"])
        round = rng.choice([0, 0, 1])
        number = self.numbers.get((name, round), 0)
        self.numbers[name, round] = number + 1
        least = self.least + len(self.attacker.colluding)
        number_of = rng.randint(min(least, len(self.clients)), len(self.clients))
        members = sorted(rng.sample(self.clients, number_of))
        honest = {
            "experiment": name,
            "round": round,
            "number": number,
            "members": members,
            "largest": 8.0,
            "model": self.model,
            "missed": "00",
        }

        def head(kind: str, client: int, words: dict[str, Any]) -> Message:
            fields = {"attempt": words["number"], "members": words["members"]}
            where = words["experiment"], client, words["round"]
            return Message(kind, *where, base=ENROLLED, fields=fields)

        def sharing(client: int, twist: dict[str, Any]) -> bytes:
            return messages.encode(head("share", client, honest | twist))

        shared = self._tell(members, "share", sharing)
        rows = {c: reply.arrays["['boxes']"] for c, reply in shared.items()}
        nonces = {c: reply.fields.get("nonce", "") for c, reply in shared.items()}

        def told(client: int, words: dict[str, Any]) -> dict[str, Any]:
            known = [one for one in words.get("sharing", list(rows)) if one in rows]
            boxes = []
            for owner in (one for one in known if one != client):
                holders = [one for one in members if one != owner]
                at = holders.index(client) if client in holders else 0
                row = rows[owner][min(at, len(rows[owner]) - 1)]
                boxes.append(base64.b64encode(row.tobytes()).decode())
            return {"nonces": [[one, nonces[one]] for one in known], "boxes": boxes}

        def masking(client: int, twist: dict[str, Any]) -> bytes:
            words = honest | twist
            first = head("round", client, words)
            missed = [words["missed"]] * words["round"]
            more = {"largest": words["largest"], "missed": missed}
            fields = {**first.fields, **told(client, words), **more}
            return messages.encode(first._replace(fields=fields), words["model"])

        def opening(client: int, twist: dict[str, Any]) -> bytes:
            words = honest | {"answered": list(masked)} | twist
            first = head("unmask", client, words)
            some = {"answered": [c for c in words["answered"] if c in masked]}
            some["boxes"] = told(client, words)["boxes"]
            following = {"attempt": 0, "members": members}
            fields = {**first.fields, **some, "next": following}
            return messages.encode(first._replace(fields=fields))

        asked = [c for c in shared if not (self.lying and rng.random() < 0.05)]
        masked = self._tell(asked, "round", masking) if asked else {}
        if masked:
            self._tell(list(masked), "unmask", opening)
            if self._lies():
                self._tell(
                    list(masked), "unmask", opening
                )  # once more, with other lies
