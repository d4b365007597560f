# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local work as a configuration states it: optimizer, schedule, steps, batches.

``rate = 0.1`` is plain SGD; ``optimizer = { name = "adam", rate = 0.01 }`` any of the
optimizers below with optax's own options; ``schedule`` lets the rate change over steps
or rounds.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax
from pydantic import Discriminator, Field, Tag, model_validator

from fedblend.config.schema.table import (
    Count,
    Fraction,
    Mixing,
    NotNegative,
    Positive,
    Table,
)
from fedblend.local import Epochs, Optimizer, Scheduled, Steps


class _Rule(Table):
    """An optimizer by name; ``make(rate)`` builds it for a number or a schedule."""

    rate: Positive

    def make(self) -> Callable[..., optax.GradientTransformation]:
        """A function from a rate to the optimizer."""
        known = getattr(optax, str(getattr(self, "name")))  # noqa: B009
        options = self.model_dump(exclude={"name", "rate"})
        return partial(known, **options)


class Sgd(_Rule):
    """Plain gradient descent."""

    name: Literal["sgd"]


class Momentum(_Rule):
    """Gradient descent with heavy-ball or Nesterov momentum."""

    name: Literal["momentum"]
    momentum: Fraction = 0.9
    nesterov: bool = False

    def make(self) -> Callable[..., optax.GradientTransformation]:
        """A function from a rate to the optimizer."""
        return partial(optax.sgd, momentum=self.momentum, nesterov=self.nesterov)


class Adam(_Rule):
    """Adam."""

    name: Literal["adam"]
    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: Positive = 1e-8


class AdamW(_Rule):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]
    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: NotNegative = 1e-4


class Yogi(_Rule):
    """Yogi."""

    name: Literal["yogi"]
    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: Positive = 1e-3


class Adagrad(_Rule):
    """Adagrad."""

    name: Literal["adagrad"]
    initial_accumulator_value: NotNegative = 0.1
    eps: Positive = 1e-7


class RmsProp(_Rule):
    """RMSProp."""

    name: Literal["rmsprop"]
    decay: Fraction = 0.9
    eps: Positive = 1e-8


def _kind(value: Any) -> str:
    """Which alternative of ``Rule`` a value means to be."""
    if isinstance(value, dict):
        return str(value.get("name", "sgd"))
    return str(getattr(value, "name", "number"))


Rule = Annotated[
    Annotated[Positive, Tag("number")]
    | Annotated[Sgd, Tag("sgd")]
    | Annotated[Momentum, Tag("momentum")]
    | Annotated[Adam, Tag("adam")]
    | Annotated[AdamW, Tag("adamw")]
    | Annotated[Yogi, Tag("yogi")]
    | Annotated[Adagrad, Tag("adagrad")]
    | Annotated[RmsProp, Tag("rmsprop")],
    Discriminator(_kind),
]
"""An optimizer: a number is plain SGD with that rate."""


class _Schedule(Table):
    """How the rate changes; ``unit`` says what is counted."""

    unit: Literal["step", "round"]

    def curve(self, rate: float) -> optax.Schedule:
        """The rate as a function of the count."""
        return optax.constant_schedule(rate)


class Constant(_Schedule):
    """The rate as it is."""

    name: Literal["constant"]


class Exponential(_Schedule):
    """``rate * decay ** (count / over)``; with ``staircase`` in steps of ``over``."""

    name: Literal["exponential"]
    decay: Annotated[float, Field(gt=0, le=1)]
    over: Count = 1
    staircase: bool = False

    def curve(self, rate: float) -> optax.Schedule:
        """The rate as a function of the count."""
        return optax.exponential_decay(
            rate, self.over, self.decay, staircase=self.staircase
        )


class Cosine(_Schedule):
    """Half a cosine from the rate down to ``end`` times it."""

    name: Literal["cosine"]
    over: Count
    end: Mixing = 0.0

    def curve(self, rate: float) -> optax.Schedule:
        """The rate as a function of the count."""
        return optax.cosine_decay_schedule(rate, self.over, self.end)


class Linear(_Schedule):
    """A straight line from the rate to ``end`` times it."""

    name: Literal["linear"]
    over: Count
    end: Mixing = 0.0

    def curve(self, rate: float) -> optax.Schedule:
        """The rate as a function of the count."""
        return optax.linear_schedule(rate, self.end * rate, self.over)


class Polynomial(_Schedule):
    """From the rate to ``end`` times it like ``(1 - count / over) ** power``."""

    name: Literal["polynomial"]
    over: Count
    power: Positive
    end: Mixing = 0.0

    def curve(self, rate: float) -> optax.Schedule:
        """The rate as a function of the count."""
        return optax.polynomial_schedule(rate, self.end * rate, self.power, self.over)


Schedule = Annotated[
    Constant | Exponential | Cosine | Linear | Polynomial, Field(discriminator="name")
]


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
        for one, other in (("rate", "optimizer"), ("steps", "epochs")):
            given = [name for name in (one, other) if getattr(self, name) is not None]
            if len(given) != 1:
                what = "both are given" if given else "is missing"
                raise ValueError(f"{one} or {other}: {what}; exactly one is needed")
        return self

    def chosen(self) -> Optimizer:
        """The optimizer; plain SGD without a schedule is its rate."""
        rule: Any = self.optimizer if self.rate is None else self.rate
        if isinstance(rule, jax.Array):  # theory's, of a split among several
            return rule
        if self.schedule is None:
            return transform(rule)
        plain = not isinstance(rule, _Rule)
        curve = self.schedule.curve(rule if plain else rule.rate)
        return Scheduled(curve, self.schedule.unit, optax.sgd if plain else rule.make())

    def amount(self) -> Steps:
        """How many steps or epochs."""
        if self.epochs is not None:
            return Epochs(self.epochs)
        assert self.steps is not None
        return np.array(self.steps) if isinstance(self.steps, list) else self.steps

    def rows(self) -> int | None:
        """Rows of a step, None for all."""
        return None if self.batch_size == "all" else self.batch_size


def transform(rule: Any) -> float | optax.GradientTransformation:
    """The optimizer that a ``Rule`` stands for, its rate a number or a traced one."""
    if not isinstance(rule, _Rule):
        return rule
    return rule.rate if isinstance(rule, Sgd) else rule.make()(rule.rate)
