# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Records, measured clients and results, of a simulation and of a deployment alike.

``Results`` is what reports, tables and the command line read. ``simulation.Run`` and
the coordinator of a deployment are such.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.data.federated import FederatedData
from fedblend.metrics import Metric, Spread, client_spread
from fedblend.stats.gains import Evidence, Measured, harms

Entry = TypeVar("Entry")


class AttributeDict(dict[str, Entry], Generic[Entry]):
    """A mapping whose entries are attributes as well."""

    def __getattr__(self, name: str) -> Entry:
        """The entry of this name."""
        if name not in self:
            there = ", ".join(self) or "nothing"
            raise AttributeError(f"{name} was not measured; there is {there}")
        return self[name]


class Metrics(AttributeDict[Spread]):
    """The metrics of a model: ``metrics.accuracy`` or ``metrics["recall@5"]``."""


class Models(AttributeDict[Metrics]):
    """What clients deploy, the shared model, and training alone."""

    personal: Metrics
    shared: Metrics
    local: Metrics


class Measures(AttributeDict[Models]):
    """What was measured over clients: ``measures.test.personal.accuracy.mean``."""

    train: Models
    validation: Models
    test: Models


def each_metric(
    nested: Mapping[str, Mapping[str, Mapping[str, Any]]],
    change: Callable[[str, str, Any], Any],
) -> Measures:
    """``{split: {model: {metric: change(split, metric, value)}}}``."""

    def metrics(split: str, of: Mapping[str, Any]) -> Metrics:
        return Metrics((name, change(split, name, of[name])) for name in of)

    def models(split: str, of: Mapping[str, Mapping[str, Any]]) -> Models:
        return Models((model, metrics(split, of[model])) for model in of)

    return Measures((split, models(split, nested[split])) for split in nested)


@dataclasses.dataclass(frozen=True)
class Record:
    """The state of one replica after a block of rounds.

    ``rounds`` and ``seconds`` are the block's (compiling and measuring left out), as
    are the members of its cohorts whose answers were received, who dropped out, or were
    rejected because an answer was not finite. Bits are totals so far over all clients.
    ``measures[split][model][metric]`` is a ``Spread`` over the measured clients.
    """

    round: int
    rounds: int
    seconds: float
    received: int
    dropped: int
    rejected: int
    bits_up: int
    bits_down: int
    measures: Measures

    def row(self) -> dict[str, Any]:
        """The record as plain values, for JSON."""
        return {**vars(self), "measures": plain(self.measures)}

    @classmethod
    def read_row(cls, row: dict[str, Any]) -> "Record":
        """The record that ``row`` was made of."""
        found = each_metric(row["measures"], lambda split, name, of: Spread(**of))
        return cls(**{**row, "measures": found})


def plain(measures: Measures) -> Measures:
    """Spreads as plain values, for JSON."""
    return each_metric(measures, lambda split, name, spread: spread._asdict())


def spreads(
    measured: Measured, counts: Mapping[str, np.ndarray], metrics: Mapping[str, Metric]
) -> Measures:
    """Each metric over the clients, weighted by their rows in the split.

    In the order in which metrics were asked for, which JAX does not keep: the first is
    the main one.
    """
    asked = {
        split: {
            model: {name: values[name] for name in metrics if name in values}
            for model, values in models.items()
        }
        for split, models in measured.items()
    }

    def spread(split: str, name: str, values: np.ndarray) -> Spread:
        return client_spread(values, counts[split], metrics[name].higher_is_better)

    return each_metric(asked, spread)


class Bits(NamedTuple):
    """Bits that each client has sent (``up``) and received (``down``) so far."""

    up: np.ndarray
    down: np.ndarray


class LocalBudget(NamedTuple):
    """How long every client trains alone, and how that was chosen."""

    rounds: int | None
    """None if every client has its own number."""
    chosen_on: str | None = None
    """Which rows chose it; None if it was asked for."""
    metric: str | None = None
    tried: int | None = None
    """Rounds that were tried to choose."""
    improving: bool = False
    """Whether more rounds than were tried might still improve."""
    rate: float = 1.0
    """The rate, as a multiple of the one that was asked for; see ``tune_rate``."""


def still_improving(alone: Mapping[str, Any] | None) -> list[str]:
    """A warning where training alone ended too early, see ``Results.alone``."""
    if alone is None or not alone["improving"]:
        return []
    return [
        f"training alone still improved after {alone['tried']} rounds, the most that "
        f"are tried; the comparison is with {alone['rounds']} rounds and may favor the "
        "federation; measure.local = N trains for more, measure.local_rate = X at "
        "another rate"
    ]


class Results(Protocol):
    """What reports, tables and the command line read, of whatever ran the algorithm.

    With replicas (several keys, or a sweep) a record is a list of records, one for
    each; ``replicas`` is None without.
    """

    federated_data: FederatedData
    replicas: int | None
    round: int
    records: list[Any]

    @property
    def shared(self) -> PyTree:
        """The shared model; with replicas, stacked."""
        ...

    @property
    def measured_ids(self) -> np.ndarray:
        """The clients that are measured."""
        ...

    @property
    def evidence(self) -> Evidence:
        """What was measured last, client by client."""
        ...

    @property
    def alone(self) -> dict[str, Any] | None:
        """How long clients train alone, to compare with; see ``LocalBudget``."""
        ...

    def bits(self, replica: int = 0) -> Bits:
        """What each client has sent and received."""
        ...

    def summary(self) -> Any:
        """The last record with totals, harmed clients and costs, as plain values."""
        ...

    def history(self, replica: int = 0) -> list[Record]:
        """The records of one replica, from the beginning."""
        if self.replicas is None:
            return list(self.records)
        return [record[replica] for record in self.records]

    @property
    def results(self) -> list[Measures]:
        """What was measured last, in each replica."""
        return [self.history(at)[-1].measures for at in range(self.replicas or 1)]

    @property
    def result(self) -> Measures:
        """What was measured last, in a run without replicas."""
        if self.replicas is not None:
            raise ValueError(
                f"result: this run has {self.replicas} replicas; `results` has them all"
            )
        return self.results[0]


def costs(
    history: Sequence[Record],
    bits: Bits,
    *,
    cohort: int,
    last_bits: int,
    alone: dict[str, Any] | None = None,
    compile_seconds: float | None = None,
    measure_seconds: float | None = None,
    strays: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Time and bits of a run, as plain values; what is None is left out.

    Args:
        history: the records of a replica.
        bits: what its clients sent and received.
        cohort: clients of a round.
        last_bits: those of the last broadcast, to one client.
        alone: what it took to train the clients that the run is compared with.
        compile_seconds: of a simulation.
        measure_seconds: likewise, since it was begun or resumed.
        strays: messages that a deployment did not expect, by kind.
    """
    clients = len(bits.up)
    found = {
        "alone": alone,
        "clients": clients,
        "cohort": cohort,
        "seconds": sum(record.seconds for record in history),
        "compile_seconds": compile_seconds,
        "measure_seconds": measure_seconds,
        "rounds": history[-1].round,
        "received": sum(record.received for record in history),
        "rejected": sum(record.rejected for record in history),
        "dropped": sum(record.dropped for record in history),
        "strays": strays,
        "bits": {
            "up": int(bits.up.sum()),
            "down": int(bits.down.sum()),
            "up_per_client": _spread(bits.up),
            "down_per_client": _spread(bits.down),
            "last_broadcast": last_bits * clients,
        },
    }
    return {name: value for name, value in found.items() if value is not None}


def _spread(bits: np.ndarray) -> dict[str, float]:
    return {
        "least": int(bits.min()),
        "mean": float(bits.mean()),
        "most": int(bits.max()),
    }


def summarize(record: Record, evidence: Evidence, costs: dict[str, Any]) -> dict:
    """A run as plain values: its last record, harmed clients, and what it cost.

    The costs are those of all rounds, in place of those of the record's block.
    """
    return {**record.row(), "harmed": harms(evidence), **costs}


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
    lines = [
        _answers(records),
        _parameters(shared),
        *(_measures(model, records, measured, counts) for model in MODELS),
    ]
    return [line for line in lines if line]


def _answers(records: Sequence[Record]) -> str:
    rejected = sum(record.rejected for record in records)
    if not rejected:
        return ""
    asked = rejected + sum(record.received for record in records)
    first = next(record for record in records if record.rejected)
    begin, end = first.round - first.rounds + 1, first.round
    when = f"round {end}" if begin == end else f"rounds {begin} to {end}"
    return (
        f"{rejected} of {asked} answers of clients were not finite and left out, the "
        f"first in {when}"
    )


def _parameters(shared: PyTree) -> str:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(shared)]
    broken = sum(int((~np.isfinite(leaf)).sum()) for leaf in leaves)
    total = sum(leaf.size for leaf in leaves)
    if not broken:
        return ""
    return f"{broken} of {total} parameters of the shared model are not finite"


def _measures(
    model: str,
    records: Sequence[Record],
    measured: Measured,
    counts: Mapping[str, np.ndarray],
) -> str:
    """One line of a model, over all splits and metrics; empty if all is finite."""
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
        return ""
    # Training alone is over before the first round: its rounds are others.
    when = "" if model == "local" else f" first in round {min(first)},"
    return (
        f"{', '.join(names)} of {MODELS[model]}: not finite,{when} at the end for "
        f"{worst[0]} of {worst[1]} clients"
    )
