# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L2GD, FedRep, agnostic FL and MAPPER as a configuration states them.

L2GD's ``steps`` is the mean number of local steps between two communications, 1/p, so
that training alone, for comparison, does as much work.
"""

from typing import Annotated, Any, ClassVar, Literal

import jax
import numpy as np
from pydantic import Field, model_validator

from fedblend import algorithms, mixing
from fedblend.config.schema.algorithm import Options, amount_of_work
from fedblend.config.schema.table import (
    ConfigError,
    Count,
    Fraction,
    Index,
    Mixing,
    NotNegative,
    Positive,
)
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.local import Work


def _under(name: str, path: str) -> bool:
    return path == name or path.startswith(f"{name}/")


class L2gd(Options):
    """Options of L2GD."""

    name: Literal["l2gd"]
    lam: NotNegative

    @model_validator(mode="after")
    def _plain_steps_of_a_random_number(self) -> "L2gd":
        if not isinstance(self.steps, int) or self.steps < 2:
            raise ValueError(
                "steps: l2gd needs their mean number in a round, one for all clients, "
                "2 or more"
            )
        if self.rate is None:
            raise ValueError("rate: l2gd takes plain steps, and no optimizer")
        if self.schedule is not None and self.schedule.unit != "round":
            raise ValueError('schedule: the unit of l2gd\'s is "round"')
        return self


class FedRep(Options):
    """Options of FedRep."""

    name: Literal["fedrep"]
    head: Annotated[list[str], Field(min_length=1)]
    head_steps: Count

    def is_head(self, path: str) -> bool:
        """Whether a parameter belongs to one of the named parts."""
        return any(_under(name, path) for name in self.head)

    def said(self, params: PyTree) -> list[Any]:
        """The body; every name must be one of a part of the parameters."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        named = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in leaves
        }
        for name in self.head:
            if not any(_under(name, path) for path in named):
                raise ConfigError(
                    f'algorithm.head: "{name}" is no part of the model, whose '
                    f"parameters are {', '.join(named)}"
                )
        return [leaf for path, leaf in named.items() if not self.is_head(path)]


class Agnostic(Options):
    """Options of agnostic FL."""

    name: Literal["agnostic"]
    q_rate: Positive


class Mapper(Options):
    """Options of MAPPER."""

    mixes: ClassVar[bool] = True

    name: Literal["mapper"]
    alpha: Mixing | list[Mixing] = 0.5  # pyright: ignore
    grid: Index = 11
    held_out: Fraction = 0.2
    mix: Literal["parameters", "outputs"] = "parameters"

    @model_validator(mode="after")
    def _what_is_tried_is_tried_on_something(self) -> "Mapper":
        if self.grid == 1:
            raise ValueError("grid: 1 weight is no choice; 0, or 2 or more")
        if self.grid and not self.held_out:
            raise ValueError("held_out: alpha needs rows to be fitted on, or grid = 0")
        return self


def l2gd(loss: Loss, options: L2gd) -> Algorithm:
    """L2GD, averaging with the probability 1/steps."""
    assert options.rate is not None
    assert isinstance(options.steps, int)
    rate: Any = options.rate
    if options.schedule is not None:
        rate = options.schedule.curve(options.rate)
    return algorithms.l2gd(
        loss, rate, lam=options.lam, p=1 / options.steps, batch_size=options.rows()
    )


def fedrep(loss: Loss, options: FedRep) -> Algorithm:
    """FedRep, whose heads are the named parts of the parameters."""
    return algorithms.fedrep(
        loss,
        Work(options.chosen(), **amount_of_work(options)),
        head=options.is_head,
        head_steps=options.head_steps,
    )


def agnostic(loss: Loss, options: Agnostic, clients: int) -> Algorithm:
    """Agnostic FL."""
    return algorithms.agnostic(
        loss,
        Work(options.chosen(), **amount_of_work(options)),
        clients=clients,
        q_rate=options.q_rate,
    )


def mapper(loss: Loss, options: Mapper) -> Algorithm:
    """MAPPER."""
    alpha = options.alpha
    return algorithms.mapper(
        loss,
        Work(options.chosen(), **amount_of_work(options)),
        alpha=np.array(alpha) if isinstance(alpha, list) else alpha,
        grid=options.grid,
        held_out=options.held_out,
        mix=getattr(mixing, options.mix),
    )
