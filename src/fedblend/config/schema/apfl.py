# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL as a configuration states it.

``alpha`` is the weight of the shared model at first, ``learn`` says when it moves, and
``held_out`` on which rows: 0 stands for the training rows of the models themselves, and
``hand_back`` for how many rounds.
"""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from fedblend import algorithms, mixing
from fedblend.algorithms.apfl_alpha import MOST_HELD_OUT
from fedblend.config.schema.algorithm import Options, amount_of_work
from fedblend.config.schema.table import Count, Mixing, Positive, between
from fedblend.core import Algorithm, Loss
from fedblend.local import Work


class _Learned(Options):
    mixes: ClassVar[bool] = True

    alpha: Mixing | list[Mixing]  # pyright: ignore
    learn: Literal["step", "round", "fixed"] = "step"
    alpha_rate: Positive | None = None
    held_out: Annotated[float, between(0, MOST_HELD_OUT, closed=True)] = 0.0

    def start(self) -> Any:
        """Alpha as the algorithms take it."""
        return np.array(self.alpha) if isinstance(self.alpha, list) else self.alpha

    @model_validator(mode="after")
    def _only_what_moves_needs_a_way(self) -> "_Learned":
        for key in ("alpha_rate", "held_out"):
            if self.learn == "fixed" and getattr(self, key):
                raise ValueError(f'{key}: has no meaning with learn = "fixed"')
        return self


class Apfl(_Learned):
    """Options of APFL."""

    name: Literal["apfl"]
    hand_back: Count | None = None
    fresh: bool = False
    mix: Literal["parameters", "outputs"] = "parameters"
    aggregated: bool = True

    @model_validator(mode="after")
    def _only_what_is_held_out_comes_back(self) -> "Apfl":
        if self.hand_back is not None and not self.held_out:
            raise ValueError("hand_back: has no meaning without held_out")
        return self


class ApflAgnostic(_Learned):
    """Options of agnostic APFL."""

    name: Literal["apfl_agnostic"]
    q_rate: Positive


def apfl(loss: Loss, options: Apfl) -> Algorithm:
    """APFL."""
    chosen = ("learn", "alpha_rate", "held_out", "hand_back", "fresh", "aggregated")
    return algorithms.apfl(
        loss,
        Work(options.chosen(), **amount_of_work(options)),
        alpha=options.start(),
        mix=getattr(mixing, options.mix),
        **{key: getattr(options, key) for key in chosen},
    )


def apfl_agnostic(loss: Loss, options: ApflAgnostic, clients: int) -> Algorithm:
    """Agnostic APFL."""
    chosen = ("learn", "alpha_rate", "held_out", "q_rate")
    return algorithms.apfl_agnostic(
        loss,
        Work(options.chosen(), **amount_of_work(options)),
        clients=clients,
        alpha=options.start(),
        **{key: getattr(options, key) for key in chosen},
    )
