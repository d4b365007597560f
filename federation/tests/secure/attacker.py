# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""All that a server, and nodes that collude with it, can read of what nodes sent.

Every reply is kept, and nothing that a server of ours checks is checked here: each
token is tried on each box, a client's masks are those of the view that it was told. A
mask that is not known is in the answers of two clients, with opposite signs, or in one.
Answers that unknown masks connect are therefore readable together or not at all, and a
set of them that no other mask touches is a sum that the attacker has.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.message import Message
from fedblend_federation.secure import masks
from fedblend_federation.secure.flatten import FixedPoint
from fedblend_federation.secure.masks import KEY_BYTES, SecureError, add_mask, unseal
from fedblend_federation.secure.session import (
    Party,
    View,
    graph_of,
    pair_mask_seed,
    self_mask_seed,
    token_view,
)

NEAR = 1e-3
"""Of the largest number of a sum: what is nearer is the same."""


class Shared(NamedTuple):
    """What a client handed out in an attempt."""

    members: tuple[int, ...]
    boxes: list[bytes]
    seeds: bytes
    nonce: str


class Answer(NamedTuple):
    """A masked answer, and what of its client is in it."""

    client: int
    attempt: str
    view: bytes
    sharing: tuple[int, ...]
    numbers: np.ndarray
    encoding: FixedPoint
    own: np.ndarray
    """The client's update, weighted; zeros where it is not finite."""
    plain: np.ndarray
    """What of it is in the answer."""
    largest: float
    told: str
    """A hash of the message of enrollment, the model and the largest weight."""


class Opening(NamedTuple):
    """What a client gave to open a sum."""

    client: int
    attempt: str
    view: bytes
    sharing: tuple[int, ...]
    answered: list[int]
    arrays: Mapping[str, np.ndarray]
    damaged: list[int]


class Sum(NamedTuple):
    """What the attacker has read, and of whom it is."""

    value: np.ndarray
    answers: list[Answer]


class Attacker:
    """Asks nodes, and learns from what they reply.

    Args:
        federation: whose nodes; those who collude lend their keys and secrets.
        colluding: the clients who do.
    """

    def __init__(self, federation: Any, colluding: Sequence[int] = ()):
        self.federation, self.colluding = federation, set(colluding)
        self.enrolled: dict[tuple[str, int], str] = {}
        self.shared: dict[tuple[str, int], Shared] = {}
        self.answers: dict[tuple[Any, ...], Answer] = {}
        self.openings: dict[tuple[Any, ...], Opening] = {}
        self.faults: list[str] = []
        """Of nodes: what no message may lead to."""

    def ask(self, client: int, data: bytes) -> bytes:
        """The reply of a node."""
        reply = self.federation.nodes[1000 + client].reply(data)
        with suppress(ValueError):  # no message at all
            self.learn(client, messages.decode(data), messages.decode(reply))
        return reply

    def learn(self, client: int, request: Message, reply: Message) -> None:
        """Keep what a reply tells, and what the node's disk says of it."""
        if reply.kind == "refused":
            reason = reply.fields["reason"]
            if reason.startswith("failed:") or "\n" in reason:
                self.faults.append(f"client {client}, {request.kind}: {reason}")
        elif reply.kind == "enroll":
            self.enrolled[request.experiment, client] = messages.digest_of(request)
        elif reply.kind == "share":
            self._learn_shares(client, request.fields, reply.fields, reply.arrays, "")
        elif reply.kind in ("round", "join"):
            self._learn_answer(client, request, reply)
        elif reply.kind == "unmask":
            self._learn_opening(client, request, reply)
            if "next" in reply.fields:
                told = request.fields["next"], reply.fields["next"], reply.arrays
                self._learn_shares(client, *told, "['next']")

    def _learn_shares(
        self, client: int, asked: Any, told: Any, arrays: Any, inside: str
    ) -> None:
        boxes = [row.tobytes() for row in arrays[f"{inside}['boxes']"]]
        seeds = arrays[f"{inside}['seeds']"].tobytes()
        found = Shared(tuple(asked["members"]), boxes, seeds, told["nonce"])
        self.shared[told["attempt"], client] = found

    def _place(self, client: int, request: Message) -> Any:
        return self.federation.folder / f"node{client}" / request.experiment

    def _learn_answer(self, client: int, request: Message, reply: Message) -> None:
        record = states.read_record(
            self._place(client, request), f"masked-{request.round}"
        )
        assert record is not None
        about, means = record.about, self.federation.means_of(client, request)
        nonces, broadcast, largest = about["view"]
        nonces = {int(one): nonce for one, nonce in nonces.items()}
        view = View(nonces, broadcast, largest).digest(bytes.fromhex(about["attempt"]))
        encoding = FixedPoint(means.bits, means.clip, len(request.fields["members"]))
        own = np.frombuffer(record.data, about["dtype"]).astype(np.float64)
        _, noted = self.federation.notes[-1]
        rows = self.federation.rows_of(client, means)
        own = own * min(rows, largest) / largest
        own = own if np.isfinite(own).all() else np.zeros_like(own)
        plain = np.zeros_like(own) if noted["zeros"] else own
        if noted["shrunk"]:
            plain = own * encoding.clip / np.abs(own).max()
        model = [request.arrays[name].tobytes() for name in sorted(request.arrays)]
        told = f"{hashlib.sha256(b''.join(model)).hexdigest()} {largest}"
        answer = Answer(
            *(client, about["attempt"], view, tuple(nonces)),
            *(reply.arrays["['masked']"], encoding),
            *(own, plain.clip(-encoding.clip, encoding.clip), largest),
            self.enrolled.get((request.experiment, client), "") + told,
        )
        key = client, about["attempt"], view
        before = self.answers.setdefault(key, answer)
        if not np.array_equal(before.numbers, answer.numbers):
            self.faults.append(f"client {client}: two answers under one mask")

    def _learn_opening(self, client: int, request: Message, reply: Message) -> None:
        kept = states.read_record(
            self._place(client, request), f"masked-{request.round}"
        )
        about = {} if kept is None else kept.about
        nonces, broadcast, largest = about["view"]
        nonces = {int(one): nonce for one, nonce in nonces.items()}
        view = View(nonces, broadcast, largest).digest(bytes.fromhex(about["attempt"]))
        answered, damaged = request.fields["answered"], reply.fields["damaged"]
        found = Opening(
            *(client, about["attempt"], view, tuple(sorted(nonces)), answered),
            *(reply.arrays, damaged),
        )
        self.openings[client, about["attempt"], view, tuple(answered)] = found

    def sums(self) -> list[Sum]:
        """All that can be read, by the smallest sets of answers."""
        attempts = {answer.attempt for answer in self.answers.values()}
        return [one for attempt in sorted(attempts) for one in self._read(attempt)]

    def _read(self, attempt: str) -> list[Sum]:
        selves, pairs = self._secrets(attempt)
        rest, tags = [], dict[Any, list[int]]()
        found = [
            one
            for one in self.answers.values()
            if one.attempt == attempt and one.client not in self.colluding
        ]
        for at, one in enumerate(found):
            left = one.numbers.copy()
            if one.client in selves:
                add_mask(left, self_mask_seed(selves[one.client], one.view), -1)
            else:
                tags[at, "self"] = [at]
            for other in set(one.sharing) - {one.client}:
                pair = min(one.client, other), max(one.client, other)
                sign = -1 if one.client < other else +1
                if pair in pairs:
                    add_mask(left, pair_mask_seed(pairs[pair], one.view), sign)
                else:
                    tags.setdefault((pair, one.view), []).append(at)
            rest.append(left)
        result = []
        for group in _connected(len(found), tags.values()):
            if any(len(ends) == 1 and ends[0] in group for ends in tags.values()):
                continue
            encoding = found[group[0]].encoding
            some = np.sum([rest[at] for at in group], axis=0, dtype=encoding.dtype)
            result.append(Sum(encoding.decode(some), [found[at] for at in group]))
        return result

    def _secrets(
        self, attempt: str
    ) -> tuple[dict[int, bytes], dict[tuple[int, int], bytes]]:
        """Seeds of clients, and of pairs of them, that shares of an attempt tell."""
        shared = {c: one for (name, c), one in self.shared.items() if name == attempt}
        if not shared:
            return {}, {}
        members = next(iter(shared.values())).members
        graph, size = graph_of(members, b""), masks.SHARE_BYTES
        selves: dict[int, dict[int, bytes]] = {c: {} for c in members}
        envelopes: dict[int, dict[int, bytes]] = {c: {} for c in members}
        pairs = dict[tuple[int, int], bytes]()
        traitors = [self._party(c, attempt, graph) for c in members]
        traitors = [one for one in traitors if one is not None]
        for one in traitors:
            for other in graph.neighbors(one.client, members):
                key = min(one.client, other), max(one.client, other)
                pairs[key] = one._pair(other)
                if other in shared:
                    at = graph.neighbors(other, members).index(one.client)
                    with suppress(SecureError):
                        both = one._read_box(other, {other: shared[other].boxes[at]})
                        selves[other][one.client + 1] = both[:size]
                        envelopes[other][one.client + 1] = both[size:]
        for one in self.openings.values():
            if one.attempt != attempt:
                continue
            content = self._content(one, graph, traitors)
            clients = sorted((one.client, *graph.neighbors(one.client, one.sharing)))
            for at, client in enumerate(clients if content else ()):
                if client not in one.damaged:
                    into = selves if client in one.answered else envelopes
                    share = content[at * size : (at + 1) * size]
                    into[client][one.client + 1] = share
        for client, known in envelopes.items():
            with suppress(SecureError, KeyError):
                key = masks.combine(known, graph.threshold)
                seeds = unseal(key, shared[client].seeds)
                for at, other in enumerate(graph.neighbors(client, members)):
                    pair = min(client, other), max(client, other)
                    pairs[pair] = seeds[at * KEY_BYTES : (at + 1) * KEY_BYTES]
        told = dict[int, bytes]()
        for client, known in selves.items():
            with suppress(SecureError):
                told[client] = masks.combine(known, graph.threshold)
        return told, pairs

    def _party(self, client: int, attempt: str, graph: Any) -> Party | None:
        """Somebody who colludes, in an attempt: its key is known."""
        if client not in self.colluding:
            return None
        means = self.federation.means(client)
        told = {"digest": bytes.fromhex(attempt), "keys": means.roster, "graph": graph}
        return Party(SimpleNamespace(**told), client, means.private, bytes(32))  # pyright: ignore

    def _content(self, one: Opening, graph: Any, traitors: list[Party]) -> bytes:
        """What is in the box of an opening, if enough tokens for it are known."""
        others = graph.neighbors(one.client, one.answered)
        shares = {one.client + 1: one.arrays["['own']"].tobytes()}
        agreed = token_view(one.view, one.answered)
        for giver, box in zip(others, one.arrays["['key_shares']"], strict=True):
            tokens = [
                giving.arrays["['tokens']"][into.index(one.client)].tobytes()
                for giving in self.openings.values()
                for into in [graph.neighbors(giver, giving.answered)]
                if giving.client == giver
                and giving.attempt == one.attempt
                and one.client in into
            ]
            own = [party for party in traitors if party.client == giver]
            tokens += [party._token(agreed, giver, one.client) for party in own]
            for token in tokens:
                with suppress(SecureError):
                    shares[giver + 1] = unseal(token, box.tobytes())
        try:
            key = masks.combine(shares, graph.threshold)
            return unseal(key, one.arrays["['box']"].tobytes())
        except SecureError:
            return b""


def _connected(count: int, ties: Any) -> list[list[int]]:
    """Those of so many that ties connect."""
    group = list(range(count))
    for ends in ties:
        names = {group[at] for at in ends}
        group = [min(names) if own in names else own for own in group]
    return [[at for at in range(count) if group[at] == own] for own in sorted({*group})]


def leaks(found: Sequence[Sum], least: int) -> list[str]:
    """What of these sums depends on too few honest clients, one line each.

    The clients of a sum are counted, and their updates, which are known here, must not
    be such that a few make up the sum: where clients were told different things, none
    of them may have a sum together.
    """
    lines = []
    for one in found:
        clients = sorted(answer.client for answer in one.answers)
        few = made_of_few(one.value, one.answers, least)
        if len(set(clients)) < least or few:
            lines.append(f"a sum of clients {clients}; {few} of them make it up")
        elif len({answer.told for answer in one.answers}) > 1:
            lines.append(f"a sum of clients {clients}, told different things")
    for one, other in combinations(found, 2):
        lines += _difference(one, other, least)
    return lines


def made_of_few(
    value: np.ndarray, answers: Sequence[Answer], least: int
) -> list[list[int]]:
    """Fewer than so many clients whose answers add up to a value that is not zero.

    A model may have next to no gradient on some clients' rows. Where all were told the
    same, such clients count: no mask hides that a sum does without them, only noise.
    """
    if not np.abs(value).max() > 0:
        return []
    most = max((np.abs(one.own).max() for one in answers), default=0.0)
    small = [one for one in answers if np.abs(one.own).max() <= NEAR * most]
    if len({one.told for one in answers}) > 1:
        small = []
    rest = [one for one in answers if not any(one is other for other in small)]
    return [
        [one.client for one in some]
        for count in range(1, least - len(small))
        for some in combinations(rest, count)
        if _same(value, np.sum([one.plain for one in some], axis=0))
    ]


def _difference(one: Sum, other: Sum, least: int) -> list[str]:
    """Where two sums differ by few clients: what is the same in both cancels.

    Updates of a model that is almost the same cancel almost. Nothing but noise stops
    that, and it is not looked for.
    """
    lines = []
    if one.value.shape != other.value.shape:
        return []
    for scale in {1.0, other.answers[0].largest / one.answers[0].largest}:
        first = {answer.client: answer.plain for answer in one.answers}
        second = {answer.client: answer.plain * scale for answer in other.answers}
        left = [
            client
            for client in sorted({*first, *second})
            if client not in first
            or client not in second
            or not _same(first[client], second[client], 1e-9)
            or not first[client].any()
        ]
        tells = not _same(one.value, other.value * scale)
        if tells and 0 < len(left) < least:
            lines.append(f"a difference of two sums of clients {left}")
    return lines


def _same(one: np.ndarray, other: np.ndarray, near: float = NEAR) -> bool:
    return bool(np.abs(one - other).max() <= near * np.abs(one).max())
