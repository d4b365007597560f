# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What of a run is not finite: its answers, its models, its measures; a line each.

A measure may be missing for good reason, where a client has no rows or an area under
the curve only one class. So clients count that have rows (of losses), or that had a
value in some round.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.simulation.result import Measured, Record

ALWAYS = ("loss", "mse")
"""Measures that every client with rows has."""
MODELS = {
    "personal": "the personal models",
    "shared": "the shared model",
    "local": "the models trained alone",
}


def not_finite(
    records: Sequence[Record],
    measured: Measured,
    counts: Mapping[str, np.ndarray],
    shared: PyTree,
) -> list[str]:
    """All that is not finite, with the first round and the number of clients.

    Args:
        records: of one replica, from the beginning.
        measured: its measures at the end.
        counts: the measured clients' rows, by split, where they are known.
        shared: its shared model at the end.
    """
    return [
        *_answers(records),
        *_parameters(shared),
        *(
            line
            for model in MODELS
            for line in _measures(model, records, measured, counts)
        ),
    ]


def _answers(records: Sequence[Record]) -> list[str]:
    rejected = sum(record.rejected for record in records)
    if not rejected:
        return []
    asked = rejected + sum(record.heard for record in records)
    first = next(record for record in records if record.rejected)
    begin, end = first.round - first.rounds + 1, first.round
    when = f"round {end}" if begin == end else f"rounds {begin} to {end}"
    return [
        f"{rejected} of {asked} answers of clients were not finite and left out, the "
        f"first in {when}"
    ]


def _parameters(shared: PyTree) -> list[str]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(shared)]
    broken = sum(int((~np.isfinite(leaf)).sum()) for leaf in leaves)
    total = sum(leaf.size for leaf in leaves)
    if not broken:
        return []
    return [f"{broken} of {total} parameters of the shared model are not finite"]


def _measures(
    model: str,
    records: Sequence[Record],
    measured: Measured,
    counts: Mapping[str, np.ndarray],
) -> list[str]:
    """One line of a model, over all splits and metrics."""
    names, first, worst = [], [], (0, 0)
    for split, models in measured.items():
        for metric, values in models.get(model, {}).items():
            spreads = [record.measures[split][model][metric] for record in records]
            known = max(spread.clients for spread in spreads)
            if metric in ALWAYS and split in counts:
                known = int((counts[split] > 0).sum())
            bad = [
                record.round
                for record, spread in zip(records, spreads, strict=True)
                if spread.clients < known or (known and not np.isfinite(spread.mean))
            ]
            if bad:
                names.append(f"{split} {metric}")
                first.append(bad[0])
                worst = max(worst, (known - int(np.isfinite(values).sum()), known))
    if not names:
        return []
    # Training alone is over before the first round: its rounds are others.
    when = "" if model == "local" else f" first in round {min(first)},"
    return [
        f"{', '.join(names)} of {MODELS[model]}: not finite,{when} at the end for "
        f"{worst[0]} of {worst[1]} clients"
    ]
