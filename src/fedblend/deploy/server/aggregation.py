# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the server does with answers that arrived: checks, sums, tables."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, PyTree
from fedblend.deploy.messages import Message
from fedblend.deploy.transport import Answers, Rejected
from fedblend.gains import Measured
from fedblend.metrics import Metric
from fedblend.simulation import aggregators
from fedblend.simulation.aggregators import DROPPED, RECEIVED, REJECTED
from fedblend.simulation.rounds import Settings

MODELS = ("personal", "shared", "local")
"""What clients measure."""
MOST_REASONS = 5
"""Members of a cohort whose reasons are told, of all that were not heard."""


def add(algorithm: Algorithm, running_sum, up, weight):
    """The tally with one up more, and the up as it was decoded."""
    decoded = algorithm.decode(up)
    return add_alone(running_sum, decoded, weight), decoded


def add_alone(running_sum, said: PyTree, weight: jax.Array):
    """The tally with what one client said, as the simulator adds a chunk of one."""
    alone = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], said)
    return aggregators.add_to(running_sum, alone, weight, jnp.ones(1, bool))[0]


def conclude(
    algorithm: Algorithm,
    settings: Settings,
    running_sum,
    stacked,
    down,
    server,
    central,
    key,
):
    """The server's step; ``stacked`` are all ups and which count, where it matters."""
    aggregate = aggregators.finish(running_sum, settings.everyone)
    if stacked is not None and settings.reduction.stacked is not None:
        ups, mask = stacked
        mean = jax.tree.map(partial(settings.reduction.stacked, mask), ups)
        aggregate = aggregate._replace(mean=mean)
    down, server = algorithm.server(aggregate, down, server, central, key)
    return down._replace(round=down.round + 1), server


def check(said: PyTree, longest: float | None = None) -> None:
    """Refuse what is not finite, or longer than is allowed."""
    if not trees.is_finite(said):
        raise Rejected("it has numbers that are not finite")
    if longest is not None:
        norm = float(jnp.sqrt(trees.squared_norm(said)))
        if not norm <= longest:
            raise Rejected(f"it is {norm:.4g} long, at most {longest:g} is allowed")


def measures(
    metrics: Mapping[str, Metric], message: Message
) -> dict[str, dict[str, dict[str, float]]]:
    """What a client measured, as far as it tells."""
    said = message.words.get("measures")
    try:
        told = {
            split: {
                model: {name: float(value) for name, value in values.items()}
                for model, values in models.items()
            }
            for split, models in said.items()  # type: ignore[union-attr]
        }
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise Rejected("its measures are damaged") from None
    for models in told.values():
        for model, values in models.items():
            for name, value in values.items():
                known = name in metrics and model in MODELS
                if not (known and math.isfinite(value)):
                    what = f"{name[:40]!r} of {model[:40]!r}"
                    raise Rejected(f"its measures are damaged: {what} is {value:g}")
    return told


def table(told: Mapping[int, Any], clients: int, splits: Mapping[str, Any]) -> Measured:
    """Measures of all clients; NaN where one did not tell.

    All models of a split have the same measures, and the personal one is among them,
    so that they can be compared, whatever single clients keep to themselves.
    """
    found: Measured = {}
    for split in splits:
        said = [models[split] for models in told.values() if models.get(split)]
        models = {"personal", *(model for one in said for model in one)}
        names = {name for one in said for values in one.values() for name in values}
        if names:
            found[split] = {
                model: {name: np.full(clients, np.nan) for name in sorted(names)}
                for model in MODELS
                if model in models
            }
    for client, measured in told.items():
        for split, columns in found.items():
            for model, values in measured.get(split, {}).items():
                for name, value in values.items():
                    columns[model][name][client] = value
    return found


def status(answers: Answers, client: int) -> int:
    """What became of a member of the cohort."""
    if client in answers.good:
        return RECEIVED
    return REJECTED if client in answers.rejected else DROPPED


def reasons(*exchanges: Answers) -> str:
    """Who was not heard, and why, in a line; of many only the first."""
    parts = []
    for answers in exchanges:
        refused, rejected = sorted(answers.refused.items()), answers.rejected.items()
        parts += [
            *(f"client {c} refused: {why}" for c, why in refused),
            *(f"client {c} rejected: {why}" for c, why in sorted(rejected)),
            *(f"client {c} silent" for c in answers.silent),
        ]
    more = len(parts) - MOST_REASONS
    if more > 0:
        parts[MOST_REASONS:] = [f"and {more} more were not heard"]
    return "; ".join(parts) or "all answered"
