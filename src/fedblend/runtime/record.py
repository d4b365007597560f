# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is known after a block of rounds, and what a run comes to in the end."""

import dataclasses
from typing import Any

import jax
import numpy as np

from fedblend.metrics import HIGHER_IS_BETTER, Spread, harm, over_clients

Measured = dict[str, dict[str, dict[str, np.ndarray]]]
"""``{split: {model: {metric: values over the measured clients}}}``."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The state of one lane after a block of rounds.

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


def _higher(name: str) -> bool:
    """Whether more is better; "recall@5" is a kind of recall."""
    return HIGHER_IS_BETTER[name.partition("@")[0]]


def plain(measures: dict[str, Any]) -> dict[str, Any]:
    """Spreads as plain values, for JSON."""
    return jax.tree.map(
        Spread._asdict, measures, is_leaf=lambda node: isinstance(node, Spread)
    )


def spreads(measured: Measured, counts: dict[str, np.ndarray]):
    """Each measure over the clients, weighted by their rows in the split."""
    return {
        split: {
            model: {
                name: over_clients(values, counts[split], _higher(name))
                for name, values in metrics.items()
            }
            for model, metrics in models.items()
        }
        for split, models in measured.items()
    }


def harms(measured: Measured) -> dict[str, Any]:
    """Whom the personal model serves worse than another, by split and metric.

    ``than_local`` compares with training alone, ``than_shared`` with the shared model.
    """
    return {
        split: {
            name: {
                f"than_{other}": harm(
                    values, models[other][name], _higher(name)
                )._asdict()
                for other in ("local", "shared")
                if other in models
            }
            for name, values in models["personal"].items()
        }
        for split, models in measured.items()
    }


def spread_of_bits(bits: np.ndarray) -> dict[str, float]:
    """How much one client sent or received: the least, the mean and the most."""
    return {
        "least": int(bits.min()),
        "mean": float(bits.mean()),
        "most": int(bits.max()),
    }


def summarise(record: Record, measured: Measured, costs: dict[str, Any]) -> dict:
    """A run as plain values: its last record, harmed clients, and what it cost."""
    return {**record.row(), "harmed": harms(measured), **costs}
