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

import dataclasses
from collections.abc import Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

import numpy as np
from pydantic import (
    PlainValidator,
    ValidationError,
    create_model,
    model_validator,
)

from fedblend import solvers
from fedblend.algorithms.fedavg import fedavg
from fedblend.compress.compressor import COMPRESSOR
from fedblend.config.imports import import_function, one_line_errors
from fedblend.config.table import (
    NO_VALUES,
    TYPES,
    Content,
    Count,
    Mixing,
    Names,
    Positive,
    Table,
    Values,
    arguments,
    first_error,
    one_of,
    one_of_or_imported,
    one_word,
    table_of,
)
from fedblend.config.tables.compress import AnyCompressor
from fedblend.config.tables.local_work import (
    WORK,
    LocalWork,
    OptimizerTable,
    fill_work,
)
from fedblend.core import Algorithm, Loss
from fedblend.errors import ConfigError, SettingError, UserError
from fedblend.mixing import MIXING
from fedblend.models import MODELS
from fedblend.registry import ALGORITHMS, FACTS, TRAINS, AlgorithmEntry, Builder
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
}
"""In place of what a run knows, where only the options matter."""


class SolverTable(Table):
    """A solver by name."""

    solver: str

    def make(self, facts: Mapping[str, Any], values: Values) -> solvers.Solver:
        """The solver."""
        solve = SOLVERS[self.solver]
        own = {"work": self.work(values)} if isinstance(self, LocalWork) else {}
        found = arguments(solve, self, {**facts, **own}, values=values)
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
            known.build(**PLACEHOLDERS, values=self.substitute_theory(1.0, 0.0))
        except UserError as error:
            raise SettingError(self._key(error.key), error.why) from None
        return self

    def substitute_theory(self, rate: Any, momentum: Any) -> Values:
        """The numbers that stand for the word "theory"; none where the builder does."""
        if self.rate != "theory" or self.entry.own_rates:
            return NO_VALUES
        server = getattr(self, "server", None)
        if isinstance(server, OptimizerTable) and server.takes_theory:
            return {"rate": rate, "server.momentum": momentum}
        return {"rate": rate}

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
                facts["omega"] = float(np.max(compressor.make().omega(dim)))
            return choose(**arguments(choose, self, facts))
        except UserError as error:
            raise ConfigError(
                f"algorithm.{self._key(error.key)}: {error.why}"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"algorithm: {error}; model.l2 above 0 makes every f_i convex"
            ) from None

    def build(
        self,
        loss: Loss,
        known: Smoothness | None,
        clients: int,
        *,
        new_client: bool = False,
        values: Values = NO_VALUES,
    ) -> Algorithm:
        """The algorithm.

        Args:
            loss: ``loss(params, rows) -> losses[rows]``.
            known: the constants of the clients' losses, None where they are unknown.
            clients: how many there are.
            new_client: build what a client runs that joins after the training.
            values: in place of those of the table; they may be traced.
        """
        entry, build = self.entry, self.entry.build
        smooth = None if known is None else known.smooth
        facts: dict[str, Any] = {"loss": loss, "clients": clients, "smooth": smooth}
        facts["convex"] = None if known is None else known.convex
        if "work" not in entry.keys:
            facts["work"] = self.work(values)
        if "algorithm" in entry.parameters:
            facts["algorithm"] = fedavg(loss, self.work(values))
        if new_client:
            build = entry.new_client.build or build
            facts |= entry.new_client.options
        return build(**arguments(build, self, facts, entry.keys, values))


def options_of(entry: AlgorithmEntry) -> type[Options]:
    """The table of an algorithm."""
    fields: dict[str, Any] = dict.fromkeys(FACTS)
    if "work" in entry.keys:
        fields[entry.keys["work"]] = (LocalWork, ...)
    if entry.theory is not None:
        fields["rate"] = (Union[Positive, Literal["theory"], None], None)  # noqa: UP007
        steps = Union[Count, list[Count], Literal["theory"], None]  # noqa: UP007
        fields["steps"] = (steps, None)
    table = table_of(entry.build, entry.name, Options, keys=entry.keys, **fields)
    table.entry = entry
    return table


OPTIONS = {name: options_of(entry) for name, entry in ALGORITHMS.items()}
"""The tables by the name of the algorithm."""


def import_options(content: Any) -> Options:
    """The table of an algorithm by import path: this imports its module.

    The function is one that ``registry.algorithm`` registers, or another of the same
    parameters; its options without a rule have the types of their defaults.
    """
    if isinstance(content, Options):
        return content
    name, folder = content["name"], content.get("import_from")
    build = import_function(name, folder if isinstance(folder, str) else None)
    own = [one for one in ALGORITHMS.values() if build in (one.build, one.builder)]
    other = AlgorithmEntry(name, build, build, ("update",), TRAINS, {}, None, None)
    entry = dataclasses.replace(own[0] if own else other, name=name)
    entry = dataclasses.replace(entry, build=_explain_errors(name, entry.build))
    with one_line_errors(name):
        table = options_of(entry)
    plain = {
        one.name: (type(one.default), one.default)
        for one in entry.parameters.values()
        if isinstance(one.default, bool | int | float | str)
        and one.name not in table.model_fields
    }
    fields: Any = {"import_from": (str | None, None), **plain}
    table = create_model(table.__name__, __base__=table, **fields)
    try:
        options = table.model_validate(content)
    except ValidationError as error:
        key, _, why = first_error(error, content).partition(": ")
        raise SettingError(key, why) from None
    built = options.build(**PLACEHOLDERS)
    if not isinstance(built, Algorithm):
        wrong = f'"{name}": returned a {type(built).__name__}, not an Algorithm'
        raise SettingError("name", wrong)
    return options


def _explain_errors(name: str, build: Builder) -> Builder:
    """The builder, its errors in one line."""

    @wraps(build)
    def build_or_explain(*args: Any, **kwargs: Any) -> Algorithm:
        with one_line_errors(name):
            return build(*args, **kwargs)

    return build_or_explain


if TYPE_CHECKING:
    AnyOptions = Options
else:
    AnyOptions = one_of_or_imported(
        OPTIONS.values(), Annotated[Any, PlainValidator(import_options)]
    )


REQUIRED: Mapping[str, Any] = {
    "alpha": 0.5,
    "copies": 2,
    "head_steps": 10,
    "inner_rate": 0.05,
    "inner_steps": 5,
    "compressor": {"name": "natural"},
    "lam": 0.1,
    "mu": 0.01,
    "personal": {"solver": "sgd"},
    "personal_steps": 10,
    "q_rate": 0.01,
    "refresh": 0.1,
    "server": 1.0,
    "tuning_steps": 10,
}
"""Options that an algorithm must have, by their keys."""


def fill(table: Content, model: str) -> Content:
    """The local work, and the options that the algorithm cannot do without."""
    name = str(table.get("name"))
    entry = ALGORITHMS.get(name)
    own = {} if entry is None else entry.defaults
    info = MODELS.get(model)
    usual = {**WORK, "rate": (info and info.rate) or WORK["rate"]}
    found = fill_work(table, {**usual, **own})
    if entry is None:
        return found
    nested = entry.keys.get("work")
    for key in _mandatory_keys(entry):
        if key == nested:
            found.setdefault(key, {})
        elif key in (entry.keeps, "head"):
            found.setdefault(key, _part(key, model))
        elif key in REQUIRED:
            found.setdefault(key, {**REQUIRED, **own}[key])
    usual |= {key: table[key] for key in ("optimizer", "batch_size") if key in table}
    if isinstance(table.get("rate"), float):
        usual["rate"] = table["rate"]
    for key, value in found.items():
        if isinstance(value, dict) and (key == nested or value.get("solver") == "sgd"):
            found[key] = fill_work(value, usual)
    return found


def _part(key: str, model: str) -> str | list[str]:
    """The part of a model that stays with a client; mostly its key says which."""
    word = "head" if key == "personal" else key
    return [MODELS[model].head] if word == "head" and model in MODELS else word


def _mandatory_keys(entry: AlgorithmEntry) -> Iterator[str]:
    """The keys of the options that have no default in the builder."""
    for name, parameter in entry.parameters.items():
        given = name in ("loss", "algorithm", *FACTS)
        is_main_work = name == "work" and name not in entry.keys
        if parameter.default is parameter.empty and not (given or is_main_work):
            yield entry.keys.get(name, name)
