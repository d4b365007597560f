# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables ``[privacy]`` and ``[protect]``: noise for clients, and for rows."""

from typing import Annotated, Any, Literal

from pydantic import model_validator

from fedblend.config.schema.run import Run
from fedblend.config.schema.table import (
    Count,
    Inside,
    Mixing,
    NotNegative,
    Positive,
    Table,
    within,
)
from fedblend.core import Loss
from fedblend.errors import SettingError
from fedblend.theory.blt import BUFFERS, Blt, optimal
from fedblend.transforms.row_noise import RowNoise, row_noise

ADAPTIVE = ("quantile", "rate", "count_noise")
"""Keys of a clip that follows the clients' norms."""


class ProtectRows(Table):
    """How gradients hide single rows, in a simulation or by the policy of a node."""

    clip: Positive = 3.0
    noise: NotNegative = 0.5

    def hide(self, loss: Loss) -> RowNoise:
        """The loss with such gradients."""
        return row_noise(loss, self.clip, self.noise)


class Protect(Table):
    """What the clients of a simulation do to their gradients."""

    rows: ProtectRows


class Privacy(Table):
    """How answers are clipped, how much noise their sum gets, and at which delta."""

    clip: Positive
    noise: NotNegative
    tree: Count | None = None
    buffers: Annotated[int, within(BUFFERS)] | None = None
    delta: Inside
    adjacency: Literal["replace_one", "zero_out", "add_or_remove"] = "replace_one"
    adaptive: bool = False
    quantile: Mixing | None = None
    rate: Positive | None = None
    count_noise: Positive | None = None
    noise_from: Literal["system", "seed"] = "system"

    @model_validator(mode="after")
    def _goes_together(self) -> "Privacy":
        for name in ADAPTIVE:
            if not self.adaptive and getattr(self, name) is not None:
                raise SettingError(name, "goes with adaptive = true")
        for name in ("tree", "buffers"):
            if self.adaptive and getattr(self, name) is not None:
                raise SettingError(name, "goes without adaptive = true, with one clip")
        if self.tree is not None and self.buffers is not None:
            raise SettingError("buffers", "goes without tree, which has other noise")
        return self

    def strategy(self, run: Run, server: Any) -> Blt:
        """How ``buffers`` correlate noise: optimal for the run.

        Args:
            run: its rounds, and how clients are drawn.
            server: the server's rate or optimizer, if it has one.
        """
        momentum = getattr(server, "momentum", 0.0)
        return optimal(
            rounds=max(run.rounds, 1),
            **taking_part(run),
            buffers=self.buffers or 0,
            momentum=momentum if isinstance(momentum, float) else 0.0,
        )


def taking_part(run: Run) -> dict[str, Any]:
    """How far apart a client takes part at least, and how often at most."""
    epochs = None if run.epoch is None else max(-(-run.rounds // run.epoch), 1)
    return {"separation": run.separation or 1, "participations": epochs}
