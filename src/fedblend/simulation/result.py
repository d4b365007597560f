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
from fedblend.gains import Gain, Sides, gain, gain_summary
from fedblend.metrics import Metric, Spread, over_clients

Measured = dict[str, dict[str, dict[str, np.ndarray]]]
"""``{split: {model: {metric: values over the measured clients}}}``."""


REFERENCES = ("local", "shared")
"""What a personal model is compared with, training alone first."""


class Evidence(NamedTuple):
    """What is known for comparing the models of every client.

    ``measured`` and ``brought`` have an entry for each seed; the latter is what single
    rows bring, [clients, rows], and empty where nobody tells. ``counts`` are the rows
    of the clients in each split, ``metrics`` what was measured.
    """

    measured: Sequence[Measured]
    brought: Sequence[Measured]
    counts: Mapping[str, np.ndarray]
    metrics: Mapping[str, Metric]

    def of_replica(self, replica: int) -> "Evidence":
        """One seed's."""
        one = slice(replica, replica + 1)
        return self._replace(measured=self.measured[one], brought=self.brought[one])

    def others(self, split: str) -> list[str]:
        """The models to compare the personal one with: all that are not the same.

        NaN everywhere does not make two models the same.
        """
        replicas = [splits[split] for splits in self.measured if split in splits]
        known = replicas[0] if replicas and "personal" in replicas[0] else {}

        def same(other: str) -> bool:
            pairs = [
                (values, models[other][metric])
                for models in replicas
                for metric, values in models["personal"].items()
            ]
            equal = all(np.array_equal(*pair, equal_nan=True) for pair in pairs)
            return equal and any(np.isfinite(values).any() for values, _ in pairs)

        return [name for name in REFERENCES if name in known and not same(name)]

    def gain(self, split: str, metric: str, other: str) -> Gain:
        """What every client gains by its personal model over the other one."""
        counts = np.asarray(self.counts[split])
        seeds = []
        for replica, splits in enumerate(self.measured):
            models = splits[split]
            own = models["personal"]
            # The mean loss is known wherever there are rows; an area may well not be.
            telling = own.get("loss", None if metric == "auc" else own[metric])
            broken = np.isinf(own[metric])
            if telling is not None:
                broken = broken | ~np.isfinite(telling)
            rows = self.brought[replica].get(split, {}) if self.brought else {}
            paired = [rows.get(name, {}).get(metric) for name in ("personal", other)]
            seeds.append(
                Sides(
                    np.asarray(own[metric], np.float64),
                    np.asarray(models[other][metric], np.float64),
                    broken & (counts > 0),
                    None if any(side is None for side in paired) else tuple(paired),  # type: ignore
                )
            )
        return gain(self.metrics[metric], seeds, counts)


@dataclasses.dataclass(frozen=True)
class Record:
    """The state of one replica after a block of rounds.

    ``rounds`` and ``seconds`` are the block's (compiling and measuring left out), as
    are the members of its cohorts that were heard, dropped out, or were rejected
    because their answer was not finite. Bits are totals so far over all clients.
    ``measures[split][model][metric]`` is a ``Spread`` over the measured clients.
    """

    round: int
    rounds: int
    seconds: float
    heard: int
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


def harms(evidence: Evidence) -> dict[str, Any]:
    """Whom the personal model serves worse than another, by split and metric.

    ``than_local`` compares with training alone, ``than_shared`` with the shared model;
    each is a ``GainSummary`` as plain values, over all seeds of the evidence. Where the
    personal model is the other one there is nothing to compare.
    """
    return {
        split: {
            name: {
                f"than_{other}": gain_summary(
                    evidence.gain(split, name, other)
                )._asdict()
                for other in evidence.others(split)
            }
            for name in models["personal"]
        }
        for replica in evidence.measured[:1]
        for split, models in replica.items()
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
