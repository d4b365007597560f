# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the server does with replies: it checks, sums, counts and tabulates them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, Key, PyTree, Sender, Up, has_ragged, ragged_bits
from fedblend.metrics import Metric
from fedblend.simulation import aggregators
from fedblend.simulation.aggregators import DROPPED, RECEIVED, REJECTED, RunningSum
from fedblend.simulation.communication import CommunicationLog, Totals
from fedblend.simulation.engine import Engine
from fedblend.simulation.rounds import Settings, Shapes
from fedblend.stats.gains import Measured
from fedblend_federation.message import Message
from fedblend_federation.server.settings import RoundRules
from fedblend_federation.transport import Rejected, Replies, Requests

MODELS = ("personal", "shared", "local")
"""The models that clients measure."""
MAX_REASONS = 5
"""Clients whose reasons are listed, of all that did not count in a round."""


class Aggregator:
    """Checks and sums what clients send, and takes the server's step; compiled once.

    Args:
        engine: the compiled functions of the simulator, with its settings.
        shapes: what server and clients exchange.
        rules: limits on what clients send, and the size of a cohort.
    """

    def __init__(self, engine: Engine, shapes: Shapes, rules: RoundRules):
        algorithm, settings = engine.settings.build(None), engine.settings
        self._rules, self._start, self._central = rules, engine.start, engine.central
        self._middle = settings.reduction.stacked
        self._needs_all = self._middle is not None
        self._no_joins = aggregators.empty(shapes.join)
        self._no_updates = aggregators.empty(shapes.decoded)
        self._inspect_join = jax.jit(_inspect_join)
        self._inspect_update = jax.jit(partial(_inspect_update, algorithm))
        self._total = jax.jit(_total)
        self._add = jax.jit(partial(_add_update, algorithm))
        self._step = jax.jit(partial(_server_step, algorithm, settings))

    def check_join(self, join: PyTree, request: PyTree) -> tuple[float, ...]:
        """Reject what a client sends at enrollment if it is not finite, or too long;
        else its norm.
        """
        found = self._inspect_join(join, request)
        return _check(found, self._rules.longest_rest)

    def check_update(
        self, up: PyTree, request: PyTree, sender: Sender
    ) -> tuple[float, ...]:
        """Reject an update if it is not finite, or too long; else its norms."""
        found = self._inspect_update(up, request, sender)
        return _check(found, self._rules.longest_update, self._rules.longest_rest)

    def sum_joins(self, joins: Sequence[PyTree], weights: np.ndarray) -> RunningSum:
        """The sum of all joins, if there are any."""
        sums = _Groups(self._no_joins, len(joins))
        for place, (join, weight) in enumerate(zip(joins, weights, strict=True)):
            sums[place] = _add(sums[place], join, weight)
        total = self._total(sums.all)
        if self._middle is None or not jax.tree.leaves(joins):
            return total
        stacked = trees.stack(joins)
        return jax.jit(partial(aggregators.replace_mean, middle=self._middle))(
            total, stacked
        )

    def start(self, joins: RunningSum) -> tuple[Any, PyTree]:
        """The server's first message and state, from the sum of all joins."""
        return self._start(joins)

    def sum_updates(
        self,
        ups: Mapping[int, PyTree],
        senders: Mapping[int, Sender],
        weights: np.ndarray,
        members: int,
        factors: Mapping[int, float] = {},
    ) -> "Total":
        """The sum of updates.

        ``ups`` are by the places of their clients among so many ``members``, in order,
        and so are ``senders``, and ``factors`` of changes of the model that are
        clipped.
        """
        sums, decoded, stacked = _Groups(self._no_updates, members), [], None
        for (place, up), weight in zip(ups.items(), weights, strict=True):
            sums[place], own = self._add(
                sums[place],
                up,
                senders[place],
                jnp.asarray(weight, float),
                factors.get(place),
            )
            decoded.append(own)
        if self._needs_all:
            missing = self._rules.cohort - len(decoded)
            decoded += [trees.zeros_like(decoded[0])] * missing
            mask = jnp.arange(len(decoded)) < len(ups)
            stacked = trees.stack(decoded), mask
        return Total(self._total(sums.all), stacked)

    def total_of(
        self, what: str, total: PyTree, weight: float, count: int
    ) -> RunningSum:
        """A sum that came as one, of "joins" or "updates"."""
        first = self._no_joins if what == "joins" else self._no_updates
        found = jax.tree.map(
            lambda leaf, zeros: jnp.asarray(leaf, zeros.dtype), total, first.total
        )
        number = jnp.asarray(count, jnp.int32)
        return RunningSum(found, jnp.asarray(weight, float), number, first.dtypes)

    def step(self, total: "Total", down, server, key: Key) -> tuple[Any, PyTree]:
        """The server's next message and state."""
        return self._step(*total, down, server, self._central, key)


class Total(NamedTuple):
    """The sum of a round's updates."""

    sum: RunningSum
    stacked: tuple[Up, jax.Array] | None = None
    """All updates and which of them count, for reductions that need them."""


class _Groups:
    """Sums of groups of members, by the places of members: each is a chunk of one."""

    def __init__(self, first: RunningSum, members: int):
        self.edges = aggregators.group_edges(max(members, 1))
        self.all = [first] * (len(self.edges) - 1)

    def _group(self, place: int) -> int:
        return int(np.searchsorted(self.edges, place, side="right")) - 1

    def __getitem__(self, place: int) -> RunningSum:
        return self.all[self._group(place)]

    def __setitem__(self, place: int, running_sum: RunningSum) -> None:
        self.all[self._group(place)] = running_sum


def _total(sums: Sequence[RunningSum]) -> RunningSum:
    """The sum of groups, added by the tree of the simulator."""
    return aggregators.tree_sum(trees.stack(sums))


def _add(running_sum: RunningSum, tree: PyTree, weight) -> RunningSum:
    """The running sum with one more tree, as the simulator adds a chunk of one."""
    chunk = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)
    weights = jnp.asarray(weight, float)[None]
    return aggregators.add_to(running_sum, chunk, weights, jnp.ones(1, bool))[0]


def _add_update(
    algorithm: Algorithm,
    running_sum: RunningSum,
    up: PyTree,
    sender: Sender,
    weight,
    factor=None,
) -> tuple[RunningSum, Up]:
    """The running sum with one more update, and the update decoded, and clipped."""
    decoded = algorithm.wire.decode(up, sender)
    if factor is not None:
        decoded = decoded._replace(delta=trees.scale(factor, decoded.delta))
    return _add(running_sum, decoded, weight), decoded


def _server_step(
    algorithm: Algorithm,
    settings: Settings,
    running_sum: RunningSum,
    stacked: tuple[Up, jax.Array] | None,
    down,
    server,
    central,
    key,
):
    """The server's next message and state.

    ``stacked`` has all updates and which of them count, for reductions that need them.
    """
    aggregate = aggregators.finish(running_sum, settings.everyone)
    if stacked is not None and settings.reduction.stacked is not None:
        ups, mask = stacked
        mean = jax.tree.map(partial(settings.reduction.stacked, mask), ups)
        aggregate = aggregate._replace(mean=mean)
    down, server = algorithm.server(aggregate, down, server, central, key)
    return down._replace(round=down.round + 1), server


def _inspect_join(join: PyTree, request: PyTree) -> tuple[jax.Array, ...]:
    """Whether all numbers are finite, and the norm of the join."""
    return trees.is_finite((join, request)), trees.norm(join)


def _inspect_update(
    algorithm: Algorithm, up: PyTree, request: PyTree, sender: Sender
) -> tuple[jax.Array, ...]:
    """Whether all numbers are finite, and the norms of the update and of its extras.

    Numbers that are finite as they travel need not be when they are decoded.
    """
    decoded = algorithm.wire.decode(up, sender)
    finite = trees.is_finite((up, request, decoded))
    return finite, trees.norm(decoded.delta), trees.norm(decoded.extra)


def _check(
    inspected: tuple[jax.Array, ...], *limits: float | None
) -> tuple[float, ...]:
    finite, *norms = inspected
    if not finite:
        raise Rejected("it has numbers that are not finite")
    for norm, limit in zip(norms, limits, strict=True):
        if limit is not None and not norm <= limit:
            raise Rejected(
                f"its norm is {float(norm):.4g}, at most {limit:g} is allowed"
            )
    return tuple(float(norm) for norm in norms)


class NormHistory:
    """The norms of updates that counted, against which new ones are checked.

    An update has several norms, of the change of the model and of what else a client
    sends. Each must be at most ``ratio`` times the lower median of the newest ones. In
    the first round, when too few are known, replies are compared with each other after
    the last has come.

    Args:
        ratio: None accepts every norm.
        clip: the change of the model is clipped to so many times the lower median of
            its norm, over the round and, where that has fewer than ten answers, those
            that counted before; None clips nothing.
    """

    KNOWN, NEWEST, MOST = 3, 10, 200
    """Norms that are enough to judge by, to clip by, and norms that are kept."""

    def __init__(self, ratio: float | None, clip: float | None = None):
        self.ratio, self.clip = ratio, clip
        self.norms = list[tuple[float, ...]]()

    def check(self, norms: tuple[float, ...]) -> None:
        """Reject an update with these norms if they are far above the usual ones."""
        if len(self.norms) >= self.KNOWN:
            self._compare(norms, self.norms)

    def settle(self, norms: Mapping[int, tuple[float, ...]]) -> dict[int, str]:
        """Take up the norms of a round; the clients that do not count, and why not."""
        rejected, known = {}, [*self.norms, *norms.values()]
        for client, own in norms.items():
            try:
                self._compare(own, known)
            except Rejected as error:
                rejected[client] = str(error)
        counted = [own for c, own in sorted(norms.items()) if c not in rejected]
        self.norms = [*self.norms, *counted][-self.MOST :]
        return rejected

    def bounds(self, norms: Mapping[int, tuple[float, ...]]) -> dict[int, float]:
        """To what the changes of clients of a settled round are clipped, if at all."""
        newest = self.norms[-max(len(norms), self.NEWEST) :]
        positive = [own[0] for own in newest if own[0] > 0]
        if self.clip is None or len(positive) < self.KNOWN:
            return {}
        most = self.clip * statistics.median_low(positive)
        return {client: most for client, own in norms.items() if own[0] > most}

    def _compare(
        self, norms: tuple[float, ...], known: Sequence[tuple[float, ...]]
    ) -> None:
        for norm, others in zip(norms, zip(*known, strict=True), strict=True):
            positive = [other for other in others if other > 0]
            if self.ratio is None or not positive:
                continue
            usual = statistics.median_low(positive)
            if not norm <= self.ratio * usual:
                raise Rejected(
                    f"its norm is {norm:.4g}, more than {self.ratio:g} times the "
                    f"median {usual:.4g} (federation.norm_ratio)"
                )


def enter_round(
    ledger: CommunicationLog,
    shapes: Shapes,
    members: np.ndarray,
    replies: Replies,
    requests: Requests,
) -> Totals:
    """Count the bits of a round, and what became of the members of its cohort."""
    ids, codes = members.tolist(), {"accepted": RECEIVED, "rejected": REJECTED}
    status = [codes.get(replies.status(client), DROPPED) for client in ids]
    ups = {client: found[0] for client, found in replies.accepted.items()}
    downs = {client: down for client, (_, down) in requests.items()}
    up_bits, down_bits = (
        np.array([_count_ragged_bits(sent.get(client)) for client in ids])
        if has_ragged(shape)
        else None
        for shape, sent in ((shapes.up, ups), (shapes.message, downs))
    )
    return ledger.enter(members, np.array(status), up_bits, down_bits)


def _count_ragged_bits(payload: PyTree | None) -> int:
    bits = None if payload is None else ragged_bits(payload)
    return 0 if bits is None else int(bits)


def measures(
    metrics: Mapping[str, Metric], reply: Message
) -> dict[str, dict[str, dict[str, float]]]:
    """The measures in a client's reply, by split, model and metric."""
    sent: Any = reply.fields.get("measures")
    try:
        found = {
            split: {
                model: {name: float(value) for name, value in values.items()}
                for model, values in models.items()
            }
            for split, models in sent.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise Rejected("its measures are damaged") from None
    for models in found.values():
        for model, values in models.items():
            for name, value in values.items():
                known = name in metrics and model in MODELS
                if not (known and math.isfinite(value)):
                    what = f"{name[:40]!r} of {model[:40]!r}"
                    raise Rejected(f"its measures are damaged: {what} is {value:g}")
    return found


def table(
    found: Mapping[int, Any], clients: int, splits: Mapping[str, Any]
) -> Measured:
    """The measures of all clients; NaN where a client sent none.

    All models of a split have the same measures, and the personal one is among them, so
    that they can be compared, whatever single clients withhold.
    """
    columns: Measured = {}
    for split in splits:
        sent = [models[split] for models in found.values() if models.get(split)]
        models = {"personal", *(model for one in sent for model in one)}
        names = {name for one in sent for values in one.values() for name in values}
        if names:
            columns[split] = {
                model: {name: np.full(clients, np.nan) for name in sorted(names)}
                for model in MODELS
                if model in models
            }
    for client, measured in found.items():
        for split, by_model in columns.items():
            for model, values in measured.get(split, {}).items():
                for name, value in values.items():
                    by_model[model][name][client] = value
    return columns


def reasons(*exchanges: Replies, names: Mapping[int, str] = {}) -> str:
    """Which clients did not count, and why, in a line; of many only the first."""

    def who(client: int) -> str:
        name = names.get(client)
        return f"client {client}" if name is None else f"client {client} ({name})"

    parts = []
    for replies in exchanges:
        refused, rejected = sorted(replies.refused.items()), replies.rejected.items()
        parts += [
            *(f"{who(c)} refused: {why}" for c, why in refused),
            *(f"{who(c)} rejected: {why}" for c, why in sorted(rejected)),
            *(f"{who(c)} silent" for c in replies.silent),
        ]
    more = len(parts) - MAX_REASONS
    if more > 0:
        parts[MAX_REASONS:] = [f"and {more} more did not count"]
    return "; ".join(parts) or "all replied"
