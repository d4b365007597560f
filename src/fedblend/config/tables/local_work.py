# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local work in a configuration: optimizers and schedules by name, steps and batches.

``momentum = "theory"`` of the server's ``nesterov`` is a number once constants are
known.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import numpy as np
import optax
from pydantic import Discriminator, Field, Tag, model_validator

from fedblend.config.table import (
    NO_VALUES,
    TYPES,
    Content,
    Count,
    Fraction,
    Mixing,
    NotNegative,
    Positive,
    Share,
    Table,
    Values,
    exactly_one,
    one_of,
    tag_table,
    values_inside,
)
from fedblend.errors import SettingError
from fedblend.local import OPTIMIZER, Epochs, Optimizer, Scheduled, Work

Choices = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
"""By name: a function, and its options with their types and defaults."""
BETAS = {"b1": (Fraction, 0.9), "b2": (Fraction, 0.999)}
DECAY = {"weight_decay": (NotNegative, 1e-4)}
OPTIMIZERS: Choices = {
    "sgd": (optax.sgd, {}),
    "momentum": (optax.sgd, {"momentum": (Fraction, 0.9), "nesterov": (bool, False)}),
    "nesterov": (
        partial(optax.sgd, nesterov=True),
        {"rate": (Positive, 1.0), "momentum": (Fraction | Literal["theory"], "theory")},
    ),
    "adam": (optax.adam, {**BETAS, "eps": (Positive, 1e-8)}),
    "adamw": (optax.adamw, {**BETAS, "eps": (Positive, 1e-8), **DECAY}),
    "yogi": (optax.yogi, {**BETAS, "eps": (Positive, 1e-3)}),
    "adagrad": (
        optax.adagrad,
        {"initial_accumulator_value": (NotNegative, 0.1), "eps": (Positive, 1e-7)},
    ),
    "rmsprop": (optax.rmsprop, {"decay": (Fraction, 0.9), "eps": (Positive, 1e-8)}),
}
OVER = {"over": (Count, ...)}
END = {"end": (Mixing, 0.0)}
SCHEDULES: Choices = {
    "constant": (optax.constant_schedule, {}),
    "exponential": (
        lambda rate, decay, over, staircase: optax.exponential_decay(
            rate, over, decay, staircase=staircase
        ),
        {"decay": (Share, ...), "over": (Count, 1), "staircase": (bool, False)},
    ),
    "cosine": (
        lambda rate, over, end: optax.cosine_decay_schedule(rate, over, end),
        OVER | END,
    ),
    "linear": (
        lambda rate, over, end: optax.linear_schedule(rate, end * rate, over),
        OVER | END,
    ),
    "polynomial": (
        lambda rate, over, power, end: optax.polynomial_schedule(
            rate, end * rate, power, over
        ),
        OVER | {"power": (Positive, ...)} | END,
    ),
}
"""How a rate changes; ``end`` is a part of the rate."""


class OptimizerTable(Table):
    """An optimizer by name, with its rate."""

    name: str
    rate: Positive

    def builder(
        self, values: Values = NO_VALUES
    ) -> Callable[..., optax.GradientTransformation]:
        """A function from a rate, a number or a schedule, to the optimizer."""
        options = {key: values.get(key, of) for key, of in self}
        del options["name"], options["rate"]
        return partial(OPTIMIZERS[self.name][0], **options)

    @property
    def takes_theory(self) -> bool:
        """Whether the momentum is still to be found from constants."""
        return isinstance(getattr(self, "momentum", None), str)

    def make(
        self, _: Mapping[str, Any] = NO_VALUES, values: Values = NO_VALUES
    ) -> float | optax.GradientTransformation:
        """The optimizer; plain SGD is its rate."""
        rate = values.get("rate", self.rate)
        return rate if self.name == "sgd" else self.builder(values)(rate)


class ScheduleTable(Table):
    """How the rate changes; ``unit`` is what is counted."""

    unit: Literal["step", "round"]
    name: str

    def curve(self, rate: float | jax.Array, values: Values) -> optax.Schedule:
        """The rate as a function of the count."""
        options = self.model_dump(exclude={"name", "unit"})
        return SCHEDULES[self.name][0](rate, **{**options, **values})


def _kind(value: Any) -> str:
    """Which alternative of ``Rule`` a value means to be."""
    if isinstance(value, dict):
        return str(value.get("name", "sgd"))
    return str(getattr(value, "name", "number"))


if TYPE_CHECKING:
    Rule = float | OptimizerTable
    Schedule = ScheduleTable
else:
    _RULES = [
        Annotated[tag_table(name, OptimizerTable, **fields), Tag(name)]
        for name, (_, fields) in OPTIMIZERS.items()
    ]
    Rule = Annotated[
        reduce(or_, _RULES, Annotated[Positive, Tag("number")]), Discriminator(_kind)
    ]
    """An optimizer: a number is plain SGD with that rate."""
    Schedule = one_of(
        tag_table(name, ScheduleTable, **fields)
        for name, (_, fields) in SCHEDULES.items()
    )


TYPES[OPTIMIZER] = Rule


class LocalWork(Table):
    """What a client does in a round."""

    rate: Positive | None = None
    optimizer: Rule | None = None
    schedule: Schedule | None = None
    steps: Count | Annotated[list[Count], Field(min_length=1)] | None = None
    epochs: Count | None = None
    batch_size: Count | Literal["all"]

    @model_validator(mode="after")
    def _one_of_each(self) -> "LocalWork":
        exactly_one(self, "rate", "optimizer")
        exactly_one(self, "steps", "epochs")
        for key, value in self:
            own = isinstance(value, OptimizerTable) and value.takes_theory
            if own and not (key == "server" and self.rate == "theory"):
                raise SettingError(
                    f"{key}.momentum",
                    '"theory" goes with server and rate = "theory"; give a number',
                )
        return self

    def _rate(self, values: Values) -> tuple[str, Any]:
        """The key of the rate, and the rate."""
        if isinstance(self.optimizer, OptimizerTable):
            key, rate = "optimizer.rate", self.optimizer.rate
        elif self.rate is None:
            key, rate = "optimizer", self.optimizer
        else:
            key, rate = "rate", self.rate
        return key, values.get(key, rate)

    def rule(self, values: Values = NO_VALUES) -> Optimizer:
        """The optimizer; plain SGD without a schedule is its rate."""
        rate, table = self._rate(values)[1], self.optimizer
        named = table if isinstance(table, OptimizerTable) else None
        settings = values_inside(values, "optimizer")
        if self.schedule is None:
            return rate if named is None else named.make({}, settings)
        curve = self.schedule.curve(rate, values_inside(values, "schedule"))
        build = optax.sgd if named is None else named.builder(settings)
        return Scheduled(curve, self.schedule.unit, build)

    def scale_rate(
        self, factor: float | jax.Array, values: Values = NO_VALUES
    ) -> Values:
        """The values with which the work has its rate times a factor."""
        key, rate = self._rate(values)
        return {**values, key: rate * factor}

    def rows(self) -> int | None:
        """Rows of a step, None for all."""
        return None if self.batch_size == "all" else self.batch_size

    def work(self, values: Values = NO_VALUES) -> Work:
        """The local work as algorithms take it."""
        steps: Any = self.steps if self.epochs is None else Epochs(self.epochs)
        if isinstance(steps, list):
            steps = np.array(steps)
        return Work(self.rule(values), steps, self.rows())

    def make(self, _: Mapping[str, Any], values: Values) -> Work:
        """What the table stands for as an argument."""
        return self.work(values)


WORK = {"rate": 0.1, "steps": 10, "batch_size": 32}
"""The local work of a client in a round."""


def fill_work(table: Content, usual: Content) -> Content:
    """The table with what it lacks of local work."""
    found = dict(table)
    if "rate" not in table and "optimizer" not in table:
        key = "optimizer" if "optimizer" in usual else "rate"
        found[key] = usual[key]
    if "steps" not in table and "epochs" not in table:
        found["steps"] = usual["steps"]
    rows = "all" if found.get("rate") == "theory" else usual["batch_size"]
    return {**found, "batch_size": table.get("batch_size", rows)}
