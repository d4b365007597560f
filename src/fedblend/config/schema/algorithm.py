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

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from fedblend import solvers
from fedblend.algorithms.fedavg import fedavg
from fedblend.compress.compressor import COMPRESSOR
from fedblend.config.schema.local_work import LocalWork, OptimizerTable
from fedblend.config.schema.table import (
    TYPES,
    Count,
    Mixing,
    Names,
    Positive,
    Table,
    arguments,
    one_of,
    one_word,
    table_of,
)
from fedblend.config.schema.tables import AnyCompressor
from fedblend.core import Algorithm, Loss
from fedblend.errors import ConfigError, SettingError, UserError
from fedblend.mixing import MIXING, Apply
from fedblend.registry import ALGORITHMS, FACTS, AlgorithmEntry
from fedblend.theory.constants import Smoothness
from fedblend.theory.local_training import LocalTraining

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
    "clients": 2,
    "features": lambda params, inputs: inputs,
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
TYPES[MIXING] = one_word(MIXING.allowed) | Names
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

    @property
    def trains_parts(self) -> bool:
        """Whether every client trains a part of the model that it never sends."""
        entry = ALGORITHMS.get(self.entry.preset_of or "", self.entry)
        never = getattr(self, "personal_steps", None) == 0
        return entry.keeps is not None and self.entry.trains_kept and not never

    @model_validator(mode="after")
    def _can_be_built(self) -> "Options":
        if self.alpha is not None and not self.mixes:
            raise SettingError(
                "alpha", f"{self.name} takes no alpha, it mixes no models"
            )
        keeps, known = self.entry.keeps, self
        if keeps is not None and isinstance(getattr(self, keeps), str):
            known = self.model_copy(update={keeps: ["known with the model"]})
        if self.steps == "theory":
            if self.rate != "theory" or not self.entry.coin:
                *most, last = (n for n, one in ALGORITHMS.items() if one.coin)
                able = f"{', '.join(most)} and {last}"
                why = f'"theory" goes with rate = "theory" of {able}'
                raise SettingError("steps", why)
            known = known.model_copy(update={"steps": 1})
        try:
            rate = "theory" if self.entry.own_rates else 1.0
            known.with_theory(rate, 0.0).build(**PLACEHOLDERS)
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
        """The key of this table for an argument such as "apfl: work: steps".

        That of a table inside, such as "rand_k: k", begins with the key of that table.
        """
        keys = self.entry.keys
        name, *parts = argument.split(": ")
        parts = [key for key, of in self if getattr(of, "name", None) == name] + parts
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
        features: Apply | None = None,
        new_client: bool = False,
    ) -> Algorithm:
        """The algorithm.

        Args:
            loss: ``loss(params, rows) -> losses[rows]``.
            known: the constants of the clients' losses, None where they are unknown.
            clients: how many there are.
            features: of the model, where it has them.
            new_client: build what a client runs that joins after the training.
        """
        entry, build = self.entry, self.entry.build
        smooth = None if known is None else known.smooth
        facts: dict[str, Any] = {"loss": loss, "clients": clients, "smooth": smooth}
        facts["convex"] = None if known is None else known.convex
        facts["features"] = features
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
    steps: Count | list[Count] | Literal["theory"] | None = None  # pyright: ignore

    def local_training(self, known: Smoothness, dim: int) -> LocalTraining:
        """Theory's rates and mean number of steps, of a method whose coin ends a round.

        Args:
            known: the constants of all clients.
            dim: parameters of the model.

        Raises:
            ConfigError: theory has none, as without strong convexity.
        """
        alpha = np.asarray(1.0 if self.alpha is None else self.alpha)
        facts = {"alpha": alpha, "smoothness": known, "steps": None}
        compressor = getattr(self, "compressor", None)
        choose: Any = self.entry.theory
        try:
            if compressor is not None:
                facts["omega"] = float(np.max(compressor.make({}).omega(dim)))
            return choose(**arguments(choose, self, facts))
        except UserError as error:
            raise ConfigError(
                f"algorithm.{self._key(error.key)}: {error.why}"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"algorithm: {error}; model.l2 above 0 makes every f_i convex"
            ) from None


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
