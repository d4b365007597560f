# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients on one frozen base: their rows in several splits, and the work of methods."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

import fedblend as fb


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long all methods train, and the settings that are tried."""

    batch: int
    steps: int
    rounds: int
    splits: int
    rank: int
    adapter_rates: tuple[float, ...]
    """Of Adam, on adapters."""
    full_rates: tuple[float, ...]
    """Of Adam, on all weights."""
    alone_rates: tuple[float, ...]
    """Of Adam, on an adapter of one client alone."""
    rounds_alone: int
    """How many are tried at most."""
    alpha: float = 0.5
    lam: float = 0.1
    validation: float = 0.15
    test: float = 0.3

    @property
    def quick(self) -> "Plan":
        """A few steps with the first of the settings: every method runs."""
        return dataclasses.replace(
            self,
            steps=1,
            rounds=2,
            splits=2,
            rank=2,
            adapter_rates=self.adapter_rates[:1],
            full_rates=self.full_rates[:1],
            alone_rates=self.alone_rates[:1],
            rounds_alone=2,
        )

    def work(self, rate: Any) -> fb.Work:
        """The local work of a round."""
        return fb.Work(optax.adam(rate), self.steps, self.batch)


class Task(NamedTuple):
    """The clients' data in all splits, and the base that they have in common."""

    plan: Plan
    model: fb.Model
    base: Any
    splits: Sequence[fb.FederatedData]
    groups: tuple[str, ...]
    """What kind of client each is."""
    loss: Callable[[Any], Any]
    """From ``apply`` to the loss of rows."""
    metrics: Callable[[Any], dict[str, fb.Metric]]
    """From ``apply`` to what is measured; the first one compares methods."""

    def adapted(self, rank: int) -> fb.Model:
        """The base with adapters of this rank as its parameters."""
        rows = self.splits[0].train.examples[0][:1]
        return fb.adapt.adapt(
            self.model, self.base, how=fb.adapt.lora(rank), inputs=rows
        )

    @property
    def keys(self) -> jax.Array:
        """A seed for each of the splits."""
        return jax.random.split(jax.random.key(0), len(self.splits))

    @property
    def metric(self) -> str:
        """The name of what compares methods."""
        return next(iter(self.metrics(self.model.apply)))

    @property
    def names(self) -> list[str]:
        """Of the clients."""
        return list(self.splits[0].names)


def splits_of(rows: Any, partition: Any, plan: Plan, names: Any) -> list[Any]:
    """The rows of the clients, split anew for each seed."""
    return [
        fb.federate(
            rows,
            partition,
            validation=plan.validation,
            test=plan.test,
            names=names,
            split=number,
        )
        for number in range(plan.splits)
    ]
