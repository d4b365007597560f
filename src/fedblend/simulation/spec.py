# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``RunSpec``: all that a simulation is made of, as one value."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.checks import fits, words
from fedblend.core import Algorithm, Key, PyTree, Shard
from fedblend.data.federated import FederatedData
from fedblend.metrics import Metric
from fedblend.simulation.aggregators import Reduction
from fedblend.simulation.run import Run
from fedblend.simulation.sampling import Strata


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What is simulated, and how: the arguments of ``simulate`` of these names.

    A configuration fills one, ``dataclasses.replace`` makes another of it, and
    ``set_up`` makes it a ``Run``.
    """

    algorithm: Algorithm | Callable[[Any], Algorithm]
    params: PyTree | Callable[[Key], PyTree]
    federated_data: FederatedData | Sequence[FederatedData]
    key: Key
    rounds: int
    cohort: int | Strata | np.ndarray | None = None
    epoch: int | None = None
    central: Shard | None = None
    weights: str | None = None
    chunk: int | None = None
    every: int | None = None
    store: str = "auto"
    store_folder: Path | None = None
    dropout: float = 0.0
    reduction: str = "mean"
    trim: float = 0.1
    measure: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    measure_on: int | Sequence[int] | None = None
    splits: Sequence[str] | None = None
    local: Run | None = None
    over: PyTree | None = None


def check_needs(
    algorithm: Algorithm,
    cohort: int,
    clients: int,
    dropout: float,
    weights: str,
    reduction: Reduction,
) -> None:
    """Refuse, in one line, what an algorithm cannot be run with."""
    needs = algorithm.needs
    fits(needs, clients)
    if needs.everyone and (cohort < clients or dropout > 0):
        raise ValueError(
            f"cohort: this algorithm needs all {clients} clients in every round, "
            f"not {cohort} with dropout {dropout:g}"
        )
    if needs.mean and reduction.stacked is not None:
        raise ValueError(
            f"reduction: {reduction.name!r} breaks this algorithm, whose server keeps "
            "the mean of the clients' memories, or counts on a mean; it needs 'mean'"
        )
    if needs.cohort not in (None, cohort):
        raise ValueError(
            f"cohort: this algorithm was built for {needs.cohort} clients in a round, "
            f"not {cohort}"
        )
    if needs.uniform and weights != "uniform":
        raise ValueError(f"weights: this algorithm needs 'uniform', not {weights!r}")


def weights_of(name: str, federated_data: FederatedData) -> np.ndarray:
    """Every client's weight in the mean: its training rows, or 1."""
    if words("by_count", "uniform")("weights", name) == "uniform":
        return np.ones(federated_data.clients)
    return federated_data.train.counts.astype(float)
