# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods compared client by client: who is harmed, and by what.

A client is harmed if its personal model is worse than the better one of what it could
have had instead: the shared adapter, or its own adapter alone. It is called so only if
the 95 % interval of the difference, over its test rows in all splits, excludes zero.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedblend.metrics import Metric
from fedblend.stats import gains


class Harm(NamedTuple):
    """Clients of a method, as numbers of them."""

    harmed: int
    """Worse than at least one alternative, in all splits together."""
    in_first_split: int
    """The same by the first split alone."""
    worse: int
    """Worse than the better alternative in the mean, sure or not."""
    helped: int
    """Better than both alternatives."""
    by_chance: int
    """How many at most would be counted as harmed by chance, in 95 of 100 cases."""
    names: list[str]
    """Of the harmed."""


def rows_of(result: Mapping[str, Any]) -> np.ndarray:
    """What single test rows say, [splits, clients, rows]; NaN where there is none."""
    return np.array(result["test"], float)


def client_means(result: Mapping[str, Any]) -> np.ndarray:
    """The mean of each client's rows, [splits, clients]."""
    return np.nanmean(rows_of(result), axis=2)


def gain_of(
    metric: Metric, own: Mapping[str, Any], other: Mapping[str, Any]
) -> gains.Gain:
    """What each client gains by one result over another, over all splits."""
    pairs = zip(rows_of(own), rows_of(other), strict=True)
    seeds = [
        gains.PairedValues(
            np.nanmean(mine, axis=1),
            np.nanmean(theirs, axis=1),
            ~np.isfinite(np.nanmean(mine, axis=1)),
            rows=(mine, theirs),
        )
        for mine, theirs in pairs
    ]
    counts = (~np.isnan(rows_of(own)[0])).sum(axis=1)
    return gains.gain(metric, seeds, counts)


def harm(
    metric: Metric,
    own: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]],
    names: list[str],
) -> Harm:
    """Who is harmed by one result beside the others."""

    def compared(part: slice) -> list[gains.Gain]:
        def some(result):
            return {"test": np.array(result["test"], float)[part]}

        return [gain_of(metric, some(own), some(other)) for other in others.values()]

    whole, first = compared(slice(None)), compared(slice(1))
    harmed = np.any([gain.harmed for gain in whole], axis=0)
    return Harm(
        int(harmed.sum()),
        int(np.any([gain.harmed for gain in first], axis=0).sum()),
        int(np.any([gain.value < 0 for gain in whole], axis=0).sum()),
        int(np.all([gain.helped for gain in whole], axis=0).sum()),
        sum(gains.gain_summary(gain).by_chance for gain in whole),
        [name for name, is_harmed in zip(names, harmed, strict=True) if is_harmed],
    )
