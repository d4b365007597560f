# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[algorithm]``: local work, and the options of each algorithm.

``rate = 0.1`` is plain SGD; ``optimizer = { name = "adam", rate = 0.01 }`` is one of
the optimizers below with optax's own options; ``schedule`` lets the rate change over
steps or rounds. Each algorithm of the registry adds its own options to this local work,
which is the parameter ``work`` of the builder. Where the builder takes an algorithm as
well, that is FedAvg with this local work, and ``work`` is a table of its own. What the
builder itself refuses is refused when a configuration is read.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax
import numpy as np
import optax
from pydantic import Discriminator, Field, Tag, model_validator

from fedblend import solvers
from fedblend.algorithms.fedavg import fedavg
from fedblend.compress.compressor import COMPRESSOR
from fedblend.config.schema.table import (
    TYPES,
    Count,
    Fraction,
    Mixing,
    NotNegative,
    Positive,
    Share,
    Table,
    arguments,
    exactly_one,
    one_of,
    table_of,
    tagged,
)
from fedblend.config.schema.tables import AnyCompressor
from fedblend.core import Algorithm, Loss
from fedblend.errors import ConfigError, SettingError, UserError
from fedblend.local import OPTIMIZER, Epochs, Optimizer, Scheduled, Work
from fedblend.registry import ALGORITHMS, FACTS, AlgorithmEntry
from fedblend.theory.constants import Smoothness

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

    def by_rate(self) -> Callable[..., optax.GradientTransformation]:
        """A function from a rate, a number or a schedule, to the optimizer."""
        options = {key: of for key, of in self if key not in ("name", "rate")}
        return partial(OPTIMIZERS[self.name][0], **options)

    @property
    def from_theory(self) -> bool:
        """Whether the momentum is still to be found from constants."""
        return isinstance(getattr(self, "momentum", None), str)

    def make(self, _: Mapping[str, Any]) -> float | optax.GradientTransformation:
        """The optimizer; plain SGD is its rate."""
        return self.rate if self.name == "sgd" else self.by_rate()(self.rate)


class ScheduleTable(Table):
    """How the rate changes; ``unit`` is what is counted."""

    unit: Literal["step", "round"]
    name: str

    def curve(self, rate: float | jax.Array) -> optax.Schedule:
        """The rate as a function of the count."""
        options = self.model_dump(exclude={"name", "unit"})
        return SCHEDULES[self.name][0](rate, **options)


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
        Annotated[tagged(name, OptimizerTable, **fields), Tag(name)]
        for name, (_, fields) in OPTIMIZERS.items()
    ]
    Rule = Annotated[
        reduce(or_, _RULES, Annotated[Positive, Tag("number")]), Discriminator(_kind)
    ]
    """An optimizer: a number is plain SGD with that rate."""
    Schedule = one_of(
        tagged(name, ScheduleTable, **fields) for name, (_, fields) in SCHEDULES.items()
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
            own = isinstance(value, OptimizerTable) and value.from_theory
            if own and not (key == "server" and self.rate == "theory"):
                raise SettingError(
                    f"{key}.momentum",
                    '"theory" goes with server and rate = "theory"; give a number',
                )
        return self

    def chosen(self) -> Optimizer:
        """The optimizer; plain SGD without a schedule is its rate."""
        rule: Any = self.optimizer if self.rate is None else self.rate
        if isinstance(rule, jax.Array) and self.schedule is None:
            return rule  # one of several, such as theory's of every split
        named = isinstance(rule, OptimizerTable)
        if self.schedule is None:
            return rule.make({}) if named else rule
        curve = self.schedule.curve(rule.rate if named else rule)
        return Scheduled(
            curve, self.schedule.unit, rule.by_rate() if named else optax.sgd
        )

    def rows(self) -> int | None:
        """Rows of a step, None for all."""
        return None if self.batch_size == "all" else self.batch_size

    def work(self) -> Work:
        """The local work as algorithms take it."""
        steps: Any = self.steps if self.epochs is None else Epochs(self.epochs)
        if isinstance(steps, list):
            steps = np.array(steps)
        return Work(self.chosen(), steps, self.rows())

    def make(self, _: Mapping[str, Any]) -> Work:
        """What the table stands for as an argument."""
        return self.work()


SOLVERS = {
    "lbfgs": solvers.lbfgs,
    "newton": solvers.newton,
    "gradient_descent": solvers.gradient_descent,
    "sgd": solvers.patient_sgd,
}
"""How a client finds its own model x_i, by name."""
PLACEHOLDERS: Any = {
    "loss": lambda params, rows: rows,
    "known": Smoothness(np.ones(()), np.zeros(()), exact=False),
    "clients": 1,
}
"""In place of what a run knows, where only the options matter."""


class SolverTable(Table):
    """A solver by name."""

    solver: str

    def make(self, facts: Mapping[str, Any]) -> solvers.Solver:
        """The solver."""
        solve = SOLVERS[self.solver]
        own = {"work": self.work()} if isinstance(self, LocalWork) else {}
        found = arguments(solve, self, {**facts, **own})
        if solve is solvers.gradient_descent and found["smooth"] is None:
            raise ConfigError(
                'algorithm.personal.solver: "gradient_descent" takes the step 1/L_i, '
                "and L_i is known for linear models only; lbfgs needs none"
            )
        return solve(**found)


class SgdTable(SolverTable, LocalWork):
    """Stochastic steps, until the loss on held-out rows stops falling."""


def _solver_table(name: str) -> type[SolverTable]:
    if name == "sgd":
        return table_of(SOLVERS[name], name, SgdTable, tag="solver")
    most = 10_000 if name == "gradient_descent" else 500
    return table_of(
        SOLVERS[name],
        name,
        SolverTable,
        tag="solver",
        tolerance=(Positive, 1e-5),
        most=(Count, most),
        smooth=None,
    )


TYPES[COMPRESSOR] = AnyCompressor
TYPES[solvers.SOLVER] = one_of(map(_solver_table, SOLVERS), "solver")


class Options(LocalWork):
    """What every algorithm takes: the clients' local work.

    Every table has ``alpha``, the weight of the shared model, so that a wrong value is
    told apart from an algorithm that takes none.
    """

    entry: ClassVar[AlgorithmEntry]

    name: str
    alpha: Mixing | list[Mixing] | None = None

    @property
    def mixes(self) -> bool:
        """Whether the algorithm mixes a shared with a personal model."""
        return "alpha" in self.entry.parameters

    @model_validator(mode="after")
    def _can_be_built(self) -> "Options":
        if self.alpha is not None and not self.mixes:
            raise SettingError(
                "alpha", f"{self.name} takes no alpha, it mixes no models"
            )
        try:
            self.with_theory(1.0, 0.0).build(**PLACEHOLDERS)
        except UserError as error:
            raise SettingError(self._key(error.key), error.why) from None
        return self

    def with_theory(self, rate: Any, momentum: Any = None) -> "Options":
        """The options with numbers in place of the word "theory"."""
        if self.rate != "theory":
            return self
        server = getattr(self, "server", None)
        update = {"rate": rate}
        if isinstance(server, OptimizerTable) and server.from_theory:
            update["server"] = server.model_copy(update={"momentum": momentum})
        return self.model_copy(update=update)

    def _key(self, argument: str) -> str:
        """The key of this table for an argument such as "apfl: work: steps"."""
        keys = self.entry.keys
        parts = argument.split(": ")[1:]
        if parts[:1] == ["work"] and "work" not in keys:
            parts = parts[1:]
        if parts == ["optimizer"] and self.rate is not None:
            parts = ["rate"]
        return ".".join(keys.get(part, part) for part in parts)

    def build(
        self,
        loss: Loss,
        known: Smoothness | None,
        clients: int,
        *,
        new_client: bool = False,
    ) -> Algorithm:
        """The algorithm.

        Args:
            loss: ``loss(params, rows) -> losses[rows]``.
            known: the constants of the clients' losses, None where they are unknown.
            clients: how many there are.
            new_client: build what a client runs that joins after the training.
        """
        entry, build = self.entry, self.entry.build
        smooth = None if known is None else known.smooth
        facts: dict[str, Any] = {"loss": loss, "clients": clients, "smooth": smooth}
        if "work" not in entry.keys:
            facts["work"] = self.work()
        if "algorithm" in entry.parameters:
            facts["algorithm"] = fedavg(loss, self.work())
        if new_client:
            build = entry.new_client.build or build
            facts |= entry.new_client.options
        return build(**arguments(build, self, facts, entry.keys))


class OptionsInTheory(Options):
    """Those of an algorithm for which theory has a step."""

    rate: Positive | Literal["theory"] | None = None  # pyright: ignore


def options_of(entry: AlgorithmEntry) -> type[Options]:
    """The table of an algorithm."""
    fields: dict[str, Any] = dict.fromkeys(FACTS)
    if "work" in entry.keys:
        fields[entry.keys["work"]] = (LocalWork, ...)
    base = OptionsInTheory if entry.theory else Options
    table = table_of(entry.build, entry.name, base, keys=entry.keys, **fields)
    table.entry = entry
    return table


OPTIONS = {name: options_of(entry) for name, entry in ALGORITHMS.items()}
"""The tables by the name of the algorithm."""
