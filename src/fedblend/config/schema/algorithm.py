# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What every algorithm of a configuration takes."""

from typing import Any, ClassVar

from pydantic import model_validator

from fedblend.config.schema.local_work import LocalWork
from fedblend.config.schema.table import Mixing
from fedblend.core import PyTree


class Options(LocalWork):
    """What every algorithm takes: the clients' local work.

    ``alpha``, the weight of the shared model, is known everywhere, so that a wrong
    one is told from one that has no meaning.
    """

    mixes: ClassVar[bool] = False

    alpha: Mixing | list[Mixing] | None = None

    def said(self, params: PyTree) -> PyTree:
        """What clients send of the parameters, by shape: all, if nobody says else."""
        return params

    @model_validator(mode="after")
    def _alpha_has_a_meaning(self) -> "Options":
        if self.alpha is not None and not self.mixes:
            name = getattr(self, "name", "")
            raise ValueError(f"alpha: {name} takes no alpha, it mixes no models")
        return self


def amount_of_work(options: LocalWork) -> dict[str, Any]:
    """Local steps and rows of a step, as the algorithms take them."""
    return {"steps": options.amount(), "batch_size": options.rows()}
