# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Records, measured clients and results, of a simulation and of a deployment alike.

``Results`` is what reports, tables and the command line read. ``simulation.Run`` and
the coordinator of a deployment are such.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.data.federated import FederatedData
from fedblend.gains import Evidence, Measured, harms
from fedblend.metrics import Metric, Spread, over_clients


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
    measures: dict[str, dict[str, dict[str, Spread]]]

    def row(self) -> dict[str, Any]:
        """The record as plain values, for JSON."""
        fields = {field.name: getattr(self, field.name) for field in _FIELDS}
        return {**fields, "measures": plain(self.measures)}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Record":
        """The record that ``row`` was made of."""
        measures = {
            split: {
                model: {name: Spread(**value) for name, value in metrics.items()}
                for model, metrics in models.items()
            }
            for split, models in row["measures"].items()
        }
        return cls(**{**row, "measures": measures})


_FIELDS = dataclasses.fields(Record)


def plain(measures: dict[str, Any]) -> dict[str, Any]:
    """Spreads as plain values, for JSON."""
    return jax.tree.map(
        Spread._asdict, measures, is_leaf=lambda node: isinstance(node, Spread)
    )


def spreads(
    measured: Measured,
    counts: Mapping[str, np.ndarray],
    metrics: Mapping[str, Metric],
) -> dict[str, dict[str, dict[str, Spread]]]:
    """Each measure over the clients, weighted by their rows in the split."""
    return {
        split: {
            model: {
                name: over_clients(
                    values, counts[split], metrics[name].higher_is_better
                )
                for name, values in by_name.items()
            }
            for model, by_name in models.items()
        }
        for split, models in measured.items()
    }


class Bits(NamedTuple):
    """Bits that each client has sent (``up``) and received (``down``) so far."""

    up: np.ndarray
    down: np.ndarray


class Metrics(dict[str, Spread]):
    """What was measured of a model: ``metrics.accuracy`` or ``metrics["recall@5"]``."""

    def __getattr__(self, name: str) -> Spread:
        """The metric of this name."""
        return _named("metrics", self, name)


@dataclasses.dataclass(frozen=True)
class SplitResult:
    """The models that were measured on one split of the clients' rows."""

    models: Mapping[str, Mapping[str, Spread]]

    @property
    def personal(self) -> Metrics:
        """What clients deploy."""
        return Metrics(_named("models", self.models, "personal"))

    @property
    def shared(self) -> Metrics:
        """The shared model."""
        return Metrics(_named("models", self.models, "shared"))

    @property
    def local(self) -> Metrics:
        """Training alone."""
        return Metrics(_named("models", self.models, "local"))


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of one replica: ``result.test.personal.accuracy.mean``."""

    record: Record

    @property
    def train(self) -> SplitResult:
        """Measured on training rows."""
        return SplitResult(_named("splits", self.record.measures, "train"))

    @property
    def validation(self) -> SplitResult:
        """Measured on validation rows."""
        return SplitResult(_named("splits", self.record.measures, "validation"))

    @property
    def test(self) -> SplitResult:
        """Measured on test rows."""
        return SplitResult(_named("splits", self.record.measures, "test"))


def _named(kind: str, there: Mapping[str, Any], name: str) -> Any:
    if name not in there:
        known = ", ".join(there) or "none"
        raise AttributeError(f"{name} was not measured; {kind}: {known}")
    return there[name]


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
        """How long clients train alone, to compare with; see ``Budget``."""
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
    def results(self) -> list[Result]:
        """The end of each replica."""
        return [Result(self.history(at)[-1]) for at in range(self.replicas or 1)]

    @property
    def result(self) -> Result:
        """The end of a run without replicas."""
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
        strays: messages that a deployment did not expect, by kind.
    """
    clients = len(bits.up)
    found = {
        "alone": alone,
        "clients": clients,
        "cohort": cohort,
        "seconds": sum(record.seconds for record in history),
        "compile_seconds": compile_seconds,
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
    """A run as plain values: its last record, harmed clients, and what it cost."""
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
    asked = rejected + sum(record.received for record in records)
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
