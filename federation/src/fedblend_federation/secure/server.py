# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How the server collects a secure sum: members share, answer and open.

Members that are gone in between are recovered from the others, as long as two thirds of
the cohort are left. What an exchange led to is on disk before the next one begins.

The server sees only masked answers of single clients. So nodes do what it would check
in them: each clips its own numbers and sends zeros in place of those not finite.
"""

import base64
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedblend import trees
from fedblend.core import PyTree
from fedblend.errors import ConfigError
from fedblend.simulation.aggregators import RunningSum
from fedblend.simulation.communication import Sizes
from fedblend_federation.message import ENROLLED, UNKNOWN, Message, add_digest
from fedblend_federation.secure import masks
from fedblend_federation.secure.flatten import (
    FixedPoint,
    Summand,
    refusal,
    unflatten,
)
from fedblend_federation.secure.masks import KEY_BYTES, OVERHEAD, SecureError
from fedblend_federation.secure.session import (
    KEY_SHARE_BYTES,
    SHARES_BYTES,
    Graph,
    Opened,
    View,
    graph_of,
    graph_seed,
    least_of,
    left_out,
    some_of,
    story,
    unmask,
)
from fedblend_federation.secure.state import (
    MASK,
    OPEN,
    OVER,
    SHARE,
    Progress,
    read_progress,
    write_progress,
)
from fedblend_federation.server.aggregation import Total, reasons
from fedblend_federation.server.collection import (
    Collected,
    all_must_join,
    too_few,
)
from fedblend_federation.server.settings import BelowQuorum
from fedblend_federation.transport import Rejected, Replies, Requests

if TYPE_CHECKING:
    from fedblend_federation.server.coordinator import Coordinator


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
        summing: "SecureCollector",
        what: str,
        requests: Requests,
    ):
        self.summing, self.what = summing, what
        self.round = next(iter(requests.values()))[0].round
        self._begin(requests)

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
        lost = []
        while True:
            progress = self.progress
            least = max(quorum, least_of(len(progress.members)))
            if progress.stage == SHARE:
                lost.append(self._share(least))
            told = story("", progress.told), self.summing.largest
            view = View(progress.nonces, *told)
            if progress.stage == OPEN:
                break
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

    def _begin(self, requests: Requests) -> None:
        """Go on with an attempt, or begin one, whose members have these requests."""
        self.requests = requests
        self.progress = self._load_progress(sorted(requests))
        members, number = self.progress.members, self.progress.number
        seed = graph_seed(self.summing.experiment, self.round, number, members)
        self.graph = graph_of(members, seed)
        self.fields = {"attempt": number, "members": members}

    def _load_progress(self, members: list[int]) -> Progress:
        """The attempt that is under way, or a new one, which is on disk."""
        before = read_progress(self.summing.folder, self.round)
        progress = Progress(members, told=self._hash_messages())
        if before is not None:
            same = before.members == members and before.stage != OVER
            if same or before.stage == OPEN:
                return before
            progress.number = before.number + 1
        write_progress(self.summing.folder, self.round, progress)
        return progress

    def _hash_messages(self) -> list[str]:
        """Hashes of the messages of all rounds, which are the same for all clients."""
        head, payload = next(iter(self.requests.values()))
        if head.kind == "join":
            return []
        before = read_progress(self.summing.folder, self.round - 1)
        same = head._replace(fields={}, round=UNKNOWN, base=UNKNOWN)
        earlier = before.told if before is not None else []
        return [*earlier, add_digest(same, payload).digest]

    def _share(self, least: int) -> Replies:
        """Ask all members to share, and write who did."""
        progress, early = self.progress, self._early()
        heads = {
            client: self._head("share", client)
            for client in progress.members
            if client not in early
        }

        def accept(reply: Message) -> tuple[Any, ...]:
            return _read_shares(reply, "", self.graph)

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
        """Ask those who shared for their answers, and write whose sum this is.

        Where too few holders can open the boxes of a member, another attempt begins
        without it.
        """
        told = {
            "nonces": sorted([client, nonce] for client, nonce in view.nonces.items()),
            "largest": view.largest,
        }

        def accept(reply: Message) -> list[int]:
            damaged = _read_damaged(reply, view.nonces)
            np.add(total, _array(reply, "masked", total.shape, total.dtype), out=total)
            return damaged

        heads, boxes = {}, self._boxes()
        for client in view.nonces:
            head, payload = self.requests[client]
            missed = self.progress.told[head.base + 1 : -1]
            fields = {**self.fields, **told, "missed": missed, "boxes": boxes[client]}
            heads[client] = (head._replace(fields=fields), payload)
        replies = self._exchange(heads, accept, least)
        complaints = self._note_damaged(replies.accepted)
        spoiled = left_out(self.graph, replies.accepted, complaints)
        for client in spoiled:
            replies.accepted.pop(client, None)
            replies.rejected[client] = "boxes that it made or holds do not open"
        try:
            self._require("answered", replies, least)
            self._require_nodes(replies)
        except BelowQuorum:
            # Nothing was opened: a new attempt may have other members.
            self._move_on(OVER)
            raise
        if spoiled:
            self._move_on(OVER)
            rest = {c: one for c, one in self.requests.items() if c not in spoiled}
            self._begin(rest)
            return replies
        self.progress.answered = sorted(replies.accepted)
        self.progress.total = total
        self._move_on(OPEN)
        return replies

    def _open(self) -> Replies:
        """Ask those who answered to open the sum."""
        progress, graph = self.progress, self.graph
        answered, size = progress.answered, masks.SHARE_BYTES

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
                    early[reply.client] = _read_shares(reply, "next", later)
            held = 1 + len(graph.neighbors(reply.client, progress.nonces))
            return Opened(
                _rows(_array(reply, "tokens", (others, KEY_BYTES))),
                _rows(_array(reply, "key_shares", (others, KEY_SHARE_BYTES))),
                _array(reply, "own", (size,)).tobytes(),
                _array(reply, "box", (held * size + OVERHEAD,)).tobytes(),
                _read_damaged(reply, progress.nonces),
            )

        boxes, same = self._boxes(), {"answered": answered, **more}
        heads = {
            client: self._head("unmask", client, boxes=boxes[client], **same)
            for client in answered
        }
        replies = self._exchange(heads, accept, least_of(len(progress.members)))
        self._note_damaged({c: one.damaged for c, one in replies.accepted.items()})
        return replies

    def _boxes(self) -> dict[int, list[str]]:
        """By holder: the boxes for it of all who shared, in order."""
        graph, sent = self.graph, self.progress.boxes
        found: dict[int, list[str]] = {holder: [] for holder in graph.holders}
        for owner in sorted(self.progress.nonces):
            others = graph.neighbors(owner, graph.holders[owner])
            for holder, box in zip(others, sent[owner], strict=True):
                found[holder].append(base64.b64encode(box.tobytes()).decode())
        return found

    def _note_damaged(
        self, damaged: Mapping[int, Sequence[int]]
    ) -> set[tuple[int, int]]:
        """Pairs of a client and a holder for whom its box does not open; noted."""
        found = {(owner, holder) for holder, some in damaged.items() for owner in some}
        for owner in sorted({owner for owner, _ in found}):
            holders = sorted(holder for one, holder in found if one == owner)
            self.summing.exchanges.note_of(owner, "damaged boxes", holders=holders)
        return found

    def _head(self, kind: str, client: int, **more: Any) -> tuple[Message, PyTree]:
        """A request with nothing in it but what the attempt is."""
        experiment, fields = self.summing.experiment, {**self.fields, **more}
        return Message(kind, experiment, client, self.round, fields=fields), ()

    def _exchange(
        self,
        heads: Requests,
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

    def _require_nodes(self, replies: Replies) -> None:
        """Go on only with as many nodes as members demand, who would open no other."""
        names, least = self.summing.names, self.progress.least
        count = len({names.get(client, str(client)) for client in replies.accepted})
        if count < least:
            raise BelowQuorum(
                f"{self.what}: clients of {count} nodes answered, {least} are needed; "
                + reasons(replies, names=names)
            )

    def _move_on(self, stage: str) -> None:
        self.progress.stage = stage
        write_progress(self.summing.folder, self.round, self.progress)


def _read_damaged(reply: Message, known: Collection[int]) -> list[int]:
    """The clients whose boxes do not open, as a holder says."""
    try:
        return some_of(reply.fields.get("damaged"), known, "sharers")
    except SecureError as error:
        raise Rejected(str(error)) from None


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


def _read_shares(reply: Message, key: str, graph: Graph) -> tuple[Any, ...]:
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


class SecureCollector:
    """Sums without seeing what is summed.

    ``folder`` is that of the progress of sums, ``largest`` the weight that counts as 1,
    and ``early`` has what clients have shared for a round and its members while they
    opened the round before.
    """

    join = ()

    def __init__(self, server: "Coordinator", sizes: Sizes):
        secure, setup = server.setup.secure, server.setup
        assert secure is not None
        reason = refusal(
            server.algorithm, server.shapes.up, server.request, server.shapes.down
        )
        if reason is not None:
            raise ConfigError(reason)
        self._server, self._secure = server, secure
        self.exchanges, self.folder = server.exchanges, secure.folder
        self.experiment, self.names = setup.experiment, setup.names
        self.largest = float(server.weights.max())
        self.early = dict[tuple[int, tuple[int, ...]], dict[int, tuple]]()
        self._summand = Summand(server.algorithm, server.shapes.up, server.shapes.down)
        self._join_size = trees.size(server.shapes.join)
        self.sizes = sizes._replace(
            up=secure.bits * self._summand.size, join=secure.bits * self._join_size
        )

    def joins(self, enrolled: Replies) -> RunningSum:
        """The sum of what all active clients send after enrollment."""
        server, active = self._server, self._server.active.tolist()
        if len(enrolled.accepted) < len(active):
            raise all_must_join(enrolled, server.setup.names)
        head = Message("join", server.setup.experiment, UNKNOWN, ENROLLED)
        requests = {client: (head._replace(client=client), ()) for client in active}
        summed = self._sum("enrollment", requests, self._join_size, len(active))
        total = unflatten(self._values(summed), server.shapes.join)
        return self._running("joins", total, summed)

    def updates(
        self, members: np.ndarray, requests: Requests, others: Replies
    ) -> Collected:
        """The sum of the updates of those members who have requests."""
        server = self._server
        if len(requests) < server.quorum:
            raise too_few(server, len(requests), others)
        what, size = f"round {server.round}", self._summand.size
        summed = self._sum(what, requests, size, server.quorum, self._following())
        values = self._values(summed)
        total = self._summand.total(values, server.down)
        found = Total(self._running("updates", total, summed))
        return Collected(found, summed.replies, {})

    def _sum(
        self,
        what: str,
        requests: Requests,
        size: int,
        quorum: int,
        following: Sequence[int] = (),
    ) -> Summed:
        empty = np.zeros(size, self._encoding(len(requests)).dtype)
        return SecureSum(self, what, requests).open(empty, quorum, following)

    def _following(self) -> list[int]:
        """The members of the next round, as far as they are enrolled."""
        server, number = self._server, self._server.round + 1
        if number >= server.rounds:
            return []
        members = np.sort(server.cohort(number))
        return members[server.bases[members] != UNKNOWN].tolist()

    def _encoding(self, members: int) -> FixedPoint:
        return FixedPoint(self._secure.bits, self._secure.clip, members)

    def _values(self, summed: Summed) -> np.ndarray:
        """The weighted sum of the clients' numbers."""
        decoded = self._encoding(len(summed.members)).decode(summed.total)
        return decoded * self.largest

    def _running(self, what: str, total: trees.PyTree, summed: Summed) -> RunningSum:
        weight = float(self._server.weights[summed.answered].sum())
        count = len(summed.answered)
        return self._server.aggregator.total_of(what, total, weight, count)
