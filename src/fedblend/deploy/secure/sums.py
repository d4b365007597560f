# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's three exchanges for a secure sum: members share, answer and open.

Those who are gone in between are recovered from the others, as long as two thirds of
the cohort are left. What an exchange led to is on disk before the next one begins.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.core import PyTree
from fedblend.deploy.message import UNKNOWN, Message, with_digest
from fedblend.deploy.secure import shamir
from fedblend.deploy.secure.attempt import View, graph_seed, story
from fedblend.deploy.secure.graph import Graph, graph_of, least_of
from fedblend.deploy.secure.masks import KEY_BYTES, OVERHEAD, SecureError
from fedblend.deploy.secure.opening import unmask
from fedblend.deploy.secure.party import KEY_SHARE_BYTES, SHARES_BYTES, Opened
from fedblend.deploy.secure.progress import (
    MASK,
    OPEN,
    OVER,
    SHARE,
    Progress,
    read_progress,
    write_progress,
)
from fedblend.deploy.server.aggregation import reasons
from fedblend.deploy.server.audited_exchange import AuditedExchange
from fedblend.deploy.server.settings import BelowQuorum
from fedblend.deploy.transport import Rejected, Replies


class Summing(NamedTuple):
    """What all secure sums of a server have in common."""

    exchanges: AuditedExchange
    folder: Path
    """Of the progress of sums."""
    experiment: str
    names: Mapping[int, str]
    """What the nodes of the clients are called."""
    largest: float
    """The weight that counts as 1."""
    early: dict[tuple[int, tuple[int, ...]], dict[int, tuple]]
    """What clients have shared for a round and its members while they opened the round
    before."""


class Summed(NamedTuple):
    """An open sum."""

    total: np.ndarray
    members: list[int]
    answered: list[int]
    replies: Replies
    """What became of each member."""


class SecureSum:
    """One sum.

    Args:
        summing: what all sums of the server have in common.
        what: the sum is of, for messages to people.
        requests: to all members, for their answers.
    """

    def __init__(
        self,
        summing: Summing,
        what: str,
        requests: Mapping[int, tuple[Message, PyTree]],
    ):
        self.summing, self.what, self.requests = summing, what, requests
        self.round = next(iter(requests.values()))[0].round
        self.progress = self._begun(sorted(requests))
        members, number = self.progress.members, self.progress.number
        seed = graph_seed(summing.experiment, self.round, number, members)
        self.graph = graph_of(members, seed)
        self.fields = {"attempt": number, "members": members}

    def open(
        self, empty: np.ndarray, quorum: int, following: Sequence[int] = ()
    ) -> Summed:
        """Go through the exchanges, from wherever they are.

        Args:
            empty: zeros of the size and type of an answer.
            quorum: answers without which nothing is opened.
            following: the members of the next round, if they are known.

        Raises:
            BelowQuorum: too few are left; another call goes on.
        """
        progress, lost = self.progress, []
        least = max(quorum, least_of(len(progress.members)))
        if progress.stage == SHARE:
            lost.append(self._share(least))
        view = View(progress.nonces, story("", progress.told), self.summing.largest)
        if progress.stage == MASK:
            progress.following = list(following)
            lost.append(self._mask(view, empty.copy(), max(least, progress.least)))
        openings = self._open()
        try:
            total = unmask(
                progress.total,
                self.graph,
                view.digest(bytes.fromhex(progress.digest)),
                {client: box.tobytes() for client, box in progress.seeds.items()},
                progress.answered,
                openings.accepted,
            )
        except SecureError as error:
            if openings.refused and not openings.accepted:
                # Nodes that refuse one set of answers may open another one.
                self._move_on(OVER)
            why = reasons(openings, names=self.summing.names)
            raise BelowQuorum(
                f"{self.what}: the sum is not open yet, {error}; {why}"
            ) from None
        members, answered = progress.members, progress.answered
        return Summed(total, members, answered, _outcome(members, answered, lost))

    def _begun(self, members: list[int]) -> Progress:
        """The attempt that is under way, or a new one, which is on disk."""
        before = read_progress(self.summing.folder, self.round)
        progress = Progress(members, told=self._told())
        if before is not None:
            same = before.members == members and before.stage != OVER
            if same or before.stage == OPEN:
                return before
            progress.number = before.number + 1
        write_progress(self.summing.folder, self.round, progress)
        return progress

    def _told(self) -> list[str]:
        """Hashes of the messages of all rounds, which are the same for all clients."""
        head, payload = next(iter(self.requests.values()))
        if head.kind == "join":
            return []
        before = read_progress(self.summing.folder, self.round - 1)
        same = head._replace(fields={}, round=UNKNOWN, base=UNKNOWN)
        earlier = before.told if before is not None else []
        return [*earlier, with_digest(same, payload).digest]

    def _share(self, least: int) -> Replies:
        """Ask all members to share, and write who did."""
        progress, early = self.progress, self._early()
        heads = {
            client: self._head("share", client)
            for client in progress.members
            if client not in early
        }

        def accept(reply: Message) -> tuple[Any, ...]:
            return _shared(reply, "", self.graph)

        replies = self._exchange(heads, accept, least - len(early))
        replies.accepted.update(early)
        found = Counter(one[0] for one in replies.accepted.values())
        digest = found.most_common(1)[0][0] if found else ""
        for client in [c for c, one in replies.accepted.items() if one[0] != digest]:
            del replies.accepted[client]
            replies.rejected[client] = (
                "it has other keys in its roster.toml, or was enrolled with other terms"
            )
        self._require("shared", replies, least)
        accepted = dict(sorted(replies.accepted.items()))
        progress.digest = digest
        progress.least = max(one[2] for one in accepted.values())
        progress.nonces = {client: one[1] for client, one in accepted.items()}
        progress.boxes = {client: one[3] for client, one in accepted.items()}
        progress.seeds = {client: one[4] for client, one in accepted.items()}
        self._move_on(MASK)
        return replies

    def _early(self) -> dict[int, tuple]:
        """What members have shared already for this attempt: the first, of them all."""
        progress = self.progress
        found = self.summing.early.pop((self.round, tuple(progress.members)), {})
        return found if progress.number == 0 else {}

    def _mask(self, view: View, total: np.ndarray, least: int) -> Replies:
        """Ask those who shared for their answers, and write whose sum this is."""
        told = {
            "nonces": sorted([client, nonce] for client, nonce in view.nonces.items()),
            "largest": view.largest,
        }

        def accept(reply: Message) -> tuple[None]:
            np.add(total, _array(reply, "masked", total.shape, total.dtype), out=total)
            return (None,)

        heads = {}
        for client in view.nonces:
            head, payload = self.requests[client]
            missed = self.progress.told[head.base + 1 : -1]
            fields = {**self.fields, **told, "missed": missed}
            heads[client] = (head._replace(fields=fields), payload)
        replies = self._exchange(heads, accept, least)
        try:
            self._require("answered", replies, least)
        except BelowQuorum:
            # Nothing was opened: a new attempt may have other members.
            self._move_on(OVER)
            raise
        self.progress.answered = sorted(replies.accepted)
        self.progress.total = total
        self._move_on(OPEN)
        return replies

    def _open(self) -> Replies:
        """Ask those who answered to open the sum."""
        progress, graph = self.progress, self.graph
        answered, size = progress.answered, shamir.SHARE_BYTES

        following, early = progress.following, dict[int, tuple]()
        self.summing.early.clear()
        self.summing.early[self.round + 1, tuple(following)] = early
        more = {"next": {"attempt": 0, "members": following}} if following else {}
        seed = graph_seed(self.summing.experiment, self.round + 1, 0, following)
        later = graph_of(following, seed) if following else None

        def accept(reply: Message) -> Opened:
            others = len(graph.neighbors(reply.client, answered))
            if later is not None and reply.client in later.holders:
                with suppress(Rejected):
                    early[reply.client] = _shared(reply, "next", later)
            held = 1 + len(graph.neighbors(reply.client, progress.nonces))
            return Opened(
                _rows(_array(reply, "tokens", (others, KEY_BYTES))),
                _rows(_array(reply, "key_shares", (others, KEY_SHARE_BYTES))),
                _array(reply, "own", (size,)).tobytes(),
                _array(reply, "box", (held * size + OVERHEAD,)).tobytes(),
            )

        places = {
            owner: {holder: at for at, holder in enumerate(graph.neighbors(owner, all))}
            for owner, all in graph.holders.items()
        }
        heads = {}
        for client in answered:
            boxes = [
                progress.boxes[owner][places[owner][client]]
                for owner in graph.neighbors(client, progress.nonces)
            ]
            head, _ = self._head("unmask", client, answered=answered, **more)
            table = np.array(boxes, np.uint8).reshape(-1, SHARES_BYTES)
            heads[client] = (head, {"boxes": table})
        return self._exchange(heads, accept, least_of(len(progress.members)))

    def _head(self, kind: str, client: int, **more: Any) -> tuple[Message, PyTree]:
        """A request with nothing in it but what the attempt is."""
        experiment, fields = self.summing.experiment, {**self.fields, **more}
        return Message(kind, experiment, client, self.round, fields=fields), ()

    def _exchange(
        self,
        heads: Mapping[int, tuple[Message, PyTree]],
        accept: Callable[[Message], Any],
        least: int,
    ) -> Replies:
        return self.summing.exchanges.exchange(heads, accept, least=least)

    def _require(self, did: str, replies: Replies, least: int) -> None:
        """Go on only with enough replies."""
        count, members = len(replies.accepted), len(self.progress.members)
        if count < least:
            raise BelowQuorum(
                f"{self.what}: {count} of {members} clients {did}, {least} are needed; "
                + reasons(replies, names=self.summing.names)
            )

    def _move_on(self, stage: str) -> None:
        self.progress.stage = stage
        write_progress(self.summing.folder, self.round, self.progress)


def _outcome(
    members: Sequence[int], answered: Sequence[int], lost: Sequence[Replies]
) -> Replies:
    """What became of each member, over all exchanges."""
    result = Replies({c: (None,) for c in answered}, {}, {}, [], Counter())
    for replies in lost:
        result.refused.update(replies.refused)
        result.rejected.update(replies.rejected)
    for reported in (result.refused, result.rejected):
        for client in set(reported) & set(answered):
            del reported[client]
    result.silent.extend(c for c in members if result.status(c) == "silent")
    return result


def _shared(reply: Message, key: str, graph: Graph) -> tuple[Any, ...]:
    """What a client shared: digest of the attempt, nonce, demand, boxes and seeds.

    Args:
        reply: of the client.
        key: of the part of the reply; empty for all of it.
        graph: of the attempt.
    """
    inside, others = f"['{key}']" if key else "", len(graph.holders[reply.client]) - 1
    boxes = _array(reply, "boxes", (others, SHARES_BYTES), inside=inside)
    seeds = _array(reply, "seeds", (others * KEY_BYTES + OVERHEAD,), inside=inside)
    fields: Any = reply.fields.get(key) if key else reply.fields
    known = fields if isinstance(fields, dict) else {}
    match [known.get(name) for name in ("attempt", "nonce", "least")]:
        case [str(digest), str(nonce), int(demanded)] if len(digest) == 64:
            return digest, nonce, demanded, boxes, seeds
    raise Rejected("its shares are damaged")


def _rows(table: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in table]


def _array(
    reply: Message,
    name: str,
    shape: tuple[int, ...],
    dtype: Any = np.uint8,
    inside: str = "",
) -> np.ndarray:
    """An array of a reply, which has this shape and type."""
    array = reply.arrays.get(f"{inside}['{name}']")
    if array is None or array.shape != shape or array.dtype != dtype:
        raise Rejected(f"its {name} are not {np.dtype(dtype)}{list(shape)}")
    return array
