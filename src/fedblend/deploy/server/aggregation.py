# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the server does with replies: it checks, sums and tabulates them."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, PyTree, Up
from fedblend.deploy.message import Message
from fedblend.deploy.transport import Rejected, Replies
from fedblend.metrics import Metric
from fedblend.simulation import aggregators
from fedblend.simulation.aggregators import DROPPED, HEARD, REJECTED, RunningSum
from fedblend.simulation.result import Measured
from fedblend.simulation.rounds import Settings

MODELS = ("personal", "shared", "local")
"""The models that clients measure."""
MAX_REASONS = 5
"""Clients whose reasons are listed, of all that did not count in a round."""


def add(
    algorithm: Algorithm, running_sum: RunningSum, up: PyTree, weight: jax.Array
) -> tuple[RunningSum, Up]:
    """The running sum with one more update, and the update decoded."""
    decoded = algorithm.decode(up)
    return add_one(running_sum, decoded, weight), decoded


def add_one(running_sum: RunningSum, tree: PyTree, weight: jax.Array) -> RunningSum:
    """The running sum with one more tree, as the simulator adds a chunk of one."""
    chunk = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)
    return aggregators.add_to(running_sum, chunk, weight, jnp.ones(1, bool))[0]


def server_step(
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


def inspect_join(join: PyTree, request: PyTree) -> tuple[jax.Array, jax.Array]:
    """Whether all numbers are finite, and the norm of what a client sends first."""
    return trees.is_finite((join, request)), _norm(join)


def inspect_update(
    algorithm: Algorithm, up: PyTree, request: PyTree
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether all numbers are finite, and the norms of the update and of its extras.

    Numbers that are finite as they travel need not be when they are decoded.
    """
    decoded = algorithm.decode(up)
    finite = trees.is_finite((up, request, decoded))
    return finite, _norm(decoded.delta), _norm(decoded.extra)


def _norm(tree: PyTree) -> jax.Array:
    return jnp.sqrt(trees.squared_norm(tree))


def check(inspected: tuple[jax.Array, ...], *limits: float | None) -> None:
    """Reject a reply that is not finite, or has a norm above its limit."""
    finite, *norms = inspected
    if not finite:
        raise Rejected("it has numbers that are not finite")
    for norm, limit in zip(norms, limits, strict=True):
        if limit is not None and not norm <= limit:
            raise Rejected(
                f"its norm is {float(norm):.4g}, at most {limit:g} is allowed"
            )


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


def status(replies: Replies, client: int) -> int:
    """What became of a member of the cohort, as the simulator codes it."""
    codes = {"accepted": HEARD, "rejected": REJECTED}
    return codes.get(replies.status(client), DROPPED)


def reasons(*exchanges: Replies) -> str:
    """Which clients did not count, and why, in a line; of many only the first."""
    parts = []
    for replies in exchanges:
        refused, rejected = sorted(replies.refused.items()), replies.rejected.items()
        parts += [
            *(f"client {c} refused: {why}" for c, why in refused),
            *(f"client {c} rejected: {why}" for c, why in sorted(rejected)),
            *(f"client {c} silent" for c in replies.silent),
        ]
    more = len(parts) - MAX_REASONS
    if more > 0:
        parts[MAX_REASONS:] = [f"and {more} more did not count"]
    return "; ".join(parts) or "all replied"
