# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How the server collects a secure sum: of single clients it sees masked answers only.

A sum takes three exchanges with the members of a cohort: they share secrets, they
answer, they open the sum. Those who are gone in between are recovered from the others,
as long as two thirds of the cohort are left.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedblend import trees
from fedblend.core import PyTree
from fedblend.deploy.message import ENROLLED, UNKNOWN, Message, with_digest
from fedblend.deploy.secure import shamir
from fedblend.deploy.secure.attempt import View, graph_seed
from fedblend.deploy.secure.fixed_point import FixedPoint
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
from fedblend.deploy.secure.summand import Summand, as_tree_like, refusal
from fedblend.deploy.server.aggregation import Total, reasons
from fedblend.deploy.server.collection import (
    Collected,
    Collection,
    PlainCollection,
    Requests,
    all_must_join,
)
from fedblend.deploy.server.settings import BelowQuorum
from fedblend.deploy.transport import Rejected, Replies
from fedblend.errors import ConfigError
from fedblend.simulation.aggregators import RunningSum
from fedblend.simulation.communication import Sizes

if TYPE_CHECKING:
    from fedblend.deploy.server.coordinator import Coordinator


def collection_of(server: "Coordinator", sizes: Sizes) -> Collection:
    """How a server collects sums, as it was set up."""
    secure = server.setup.secure is not None
    return SecureCollection(server, sizes) if secure else PlainCollection(server, sizes)


class SecureCollection:
    """Sums without seeing what is summed."""

    join = ()

    def __init__(self, server: "Coordinator", sizes: Sizes):
        assert server.setup.secure is not None
        self._server, self._secure = server, server.setup.secure
        reason = refusal(server.shapes.up, server.request)
        if reason is not None:
            raise ConfigError(reason)
        self._summand = Summand(server.algorithm, server.shapes.up)
        self._join_size = trees.size(server.shapes.join)
        self.sizes = sizes._replace(
            up=self._secure.bits * self._summand.size,
            join=self._secure.bits * self._join_size,
        )
        self._largest = float(server.weights.max())

    def joins(self, enrolled: Replies) -> RunningSum:
        """The sum of what all active clients send after enrollment."""
        server, active = self._server, self._server.active.tolist()
        if len(enrolled.accepted) < len(active):
            raise all_must_join(enrolled, server.setup.names)
        head = Message("join", server.setup.experiment, UNKNOWN, ENROLLED)
        requests = {client: (head._replace(client=client), ()) for client in active}
        size, least = self._join_size, len(active)
        values, answered, _ = self._sum("enrollment", requests, size, least)
        total = as_tree_like(values, server.shapes.join)
        weight, count = float(server.weights[answered].sum()), len(answered)
        return server.aggregator.total_of("joins", total, weight, count)

    def updates(
        self, members: np.ndarray, requests: Requests, others: Replies
    ) -> Collected:
        """The sum of the updates of those members who have requests."""
        server, what = self._server, f"round {self._server.round}"
        del members
        if len(requests) < server.quorum:
            raise _too_few(server, what, "enrolled", len(requests), others)
        values, answered, replies = self._sum(
            what, requests, self._summand.size, server.quorum
        )
        total = self._summand.total(values, server.engine.key, server.down)
        weight, count = float(server.weights[answered].sum()), len(answered)
        found = server.aggregator.total_of("updates", total, weight, count)
        return Collected(Total(found), replies, {})

    def _sum(
        self, what: str, requests: Requests, size: int, quorum: int
    ) -> tuple[np.ndarray, list[int], Replies]:
        """The weighted sum of answers, whose they are, and what became of the others.

        Raises:
            BelowQuorum: too few are left; the next call goes on.
        """
        server, round = self._server, next(iter(requests.values()))[0].round
        progress = self._begun(round, sorted(requests))
        members = progress.members
        fixed_point = FixedPoint(self._secure.bits, self._secure.clip, len(members))
        seed = graph_seed(server.setup.experiment, round, progress.number, members)
        step = _Step(server, what, round, progress, graph_of(members, seed))
        least = max(quorum, least_of(len(members)))
        lost = [self._share(step, least)] if progress.stage == SHARE else []
        view = View(progress.nonces, _broadcast(requests), self._largest)
        if progress.stage == MASK:
            empty = np.zeros(size, fixed_point.dtype)
            lost.append(self._mask(step, requests, view, empty, least))
        openings = self._open(step)
        try:
            total = unmask(
                progress.total,
                step.graph,
                view.digest(bytes.fromhex(progress.digest)),
                {client: box.tobytes() for client, box in progress.seeds.items()},
                progress.answered,
                openings.accepted,
            )
        except SecureError as error:
            raise BelowQuorum(
                f"{what}: the sum is not open yet, {error}; "
                + reasons(openings, names=server.setup.names)
            ) from None
        values = fixed_point.decode(total) * self._largest
        return values, progress.answered, _outcome(members, progress.answered, lost)

    def _begun(self, round: int, members: list[int]) -> Progress:
        """The attempt that is under way, or a new one, which is on disk."""
        before = read_progress(self._secure.folder, round)
        progress = Progress(members)
        if before is not None:
            same = before.members == members and before.stage != OVER
            if same or before.stage == OPEN:
                return before
            progress.number = before.number + 1
        write_progress(self._secure.folder, round, progress)
        return progress

    def _share(self, step: "_Step", least: int) -> Replies:
        """Ask all members to share, and write who did."""
        progress, size = step.progress, KEY_BYTES

        def accept(reply: Message) -> tuple[Any, ...]:
            others = len(step.graph.holders[reply.client]) - 1
            boxes = _array(reply, "boxes", (others, SHARES_BYTES))
            seeds = _array(reply, "seeds", (others * size + OVERHEAD,))
            words = [reply.fields.get(name) for name in ("attempt", "nonce", "least")]
            match words:
                case [str(digest), str(nonce), int(demanded)] if len(digest) == 64:
                    return digest, nonce, demanded, boxes, seeds
            raise Rejected("its shares are damaged")

        heads = {client: step.head("share", client) for client in progress.members}
        replies = step.exchange(heads, accept, least)
        found = Counter(one[0] for one in replies.accepted.values())
        digest = found.most_common(1)[0][0] if found else ""
        for client in [c for c, one in replies.accepted.items() if one[0] != digest]:
            del replies.accepted[client]
            replies.rejected[client] = "it has other keys in its roster.toml"
        step.require("shared", replies, least)
        accepted = dict(sorted(replies.accepted.items()))
        progress.digest = digest
        progress.least = max(one[2] for one in accepted.values())
        progress.nonces = {client: one[1] for client, one in accepted.items()}
        progress.boxes = {client: one[3] for client, one in accepted.items()}
        progress.seeds = {client: one[4] for client, one in accepted.items()}
        self._move_on(step, MASK)
        return replies

    def _mask(
        self,
        step: "_Step",
        requests: Requests,
        view: View,
        total: np.ndarray,
        least: int,
    ) -> Replies:
        """Ask those who shared for their answers, and write whose sum this is."""
        progress = step.progress
        told = {
            "nonces": sorted([client, nonce] for client, nonce in view.nonces.items()),
            "largest": view.largest,
        }

        def accept(reply: Message) -> tuple[None]:
            np.add(total, _array(reply, "masked", total.shape, total.dtype), out=total)
            return (None,)

        heads = {}
        for client in progress.nonces:
            head, payload = requests[client]
            fields = {**step.fields, **told}
            heads[client] = (head._replace(fields=fields), payload)
        least = max(least, progress.least)
        replies = step.exchange(heads, accept, least)
        try:
            step.require("answered", replies, least)
        except BelowQuorum:
            # Nothing was opened: a new attempt may have other members.
            self._move_on(step, OVER)
            raise
        progress.answered, progress.total = sorted(replies.accepted), total
        self._move_on(step, OPEN)
        return replies

    def _open(self, step: "_Step") -> Replies:
        """Ask those who answered to open the sum."""
        progress, graph = step.progress, step.graph
        answered, size = progress.answered, shamir.SHARE_BYTES

        def accept(reply: Message) -> Opened:
            others = len(graph.neighbors(reply.client, answered))
            held = 1 + len(graph.neighbors(reply.client, progress.nonces))
            return Opened(
                _rows(_array(reply, "tokens", (others, KEY_BYTES))),
                _rows(_array(reply, "key_shares", (others, KEY_SHARE_BYTES))),
                _array(reply, "own", (size,)).tobytes(),
                _array(reply, "box", (held * size + OVERHEAD,)).tobytes(),
            )

        heads = {}
        for client in answered:
            boxes = [
                progress.boxes[other][_place(graph, other, client)]
                for other in graph.neighbors(client, progress.nonces)
            ]
            head, _ = step.head("unmask", client, answered=answered)
            table = np.array(boxes, np.uint8).reshape(-1, SHARES_BYTES)
            heads[client] = (head, {"boxes": table})
        return step.exchange(heads, accept, least_of(len(progress.members)))

    def _move_on(self, step: "_Step", stage: str) -> None:
        step.progress.stage = stage
        write_progress(self._secure.folder, step.round, step.progress)


class _Step:
    """What the exchanges of an attempt have in common."""

    def __init__(
        self,
        server: "Coordinator",
        what: str,
        round: int,
        progress: Progress,
        graph: Graph,
    ):
        self.server, self.what, self.round = server, what, round
        self.progress, self.graph = progress, graph
        self.fields = {"attempt": progress.number, "members": progress.members}

    def head(self, kind: str, client: int, **more: Any) -> tuple[Message, PyTree]:
        """A request with nothing in it but what the attempt is."""
        experiment, fields = self.server.setup.experiment, {**self.fields, **more}
        return Message(kind, experiment, client, self.round, fields=fields), ()

    def exchange(
        self, heads: Requests, accept: Callable[[Message], Any], least: int
    ) -> Replies:
        """Send requests; the exchange need not wait for all if so many replied."""
        return self.server.exchanges.exchange(heads, accept, least=least)

    def require(self, did: str, replies: Replies, least: int) -> None:
        """Go on only with enough replies."""
        if len(replies.accepted) < least:
            count, names = len(replies.accepted), self.server.setup.names
            raise BelowQuorum(
                f"{self.what}: {count} of {len(self.progress.members)} clients {did}, "
                f"{least} are needed; {reasons(replies, names=names)}"
            )


def _too_few(
    server: "Coordinator", what: str, did: str, count: int, replies: Replies
) -> BelowQuorum:
    return BelowQuorum(
        f"{what}: {count} of {server.rules.cohort} clients {did}, {server.quorum} are "
        f"needed; {reasons(replies, names=server.setup.names)}"
    )


def _broadcast(requests: Requests) -> str:
    """The hash of the message of a round, the same for all clients."""
    head, payload = next(iter(requests.values()))
    if head.kind == "join":
        return ""
    plain = head._replace(fields={}, base=UNKNOWN)
    return with_digest(plain, payload).digest


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


def _place(graph: Graph, owner: int, holder: int) -> int:
    """The place of a holder's box among those that the owner sent."""
    return graph.neighbors(owner, graph.holders[owner]).index(holder)


def _rows(table: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in table]


def _array(
    reply: Message, name: str, shape: tuple[int, ...], dtype: Any = np.uint8
) -> np.ndarray:
    """An array of a reply, which has this shape and type."""
    found: Mapping[str, np.ndarray] = reply.arrays
    array = found.get(f"['{name}']")
    if array is None or array.shape != shape or array.dtype != dtype:
        raise Rejected(f"its {name} are not {np.dtype(dtype)}{list(shape)}")
    return array
