# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``policy.toml``: what the operator of a node agrees to.

The node reads the file once for every message, so that a change counts at once. The
defaults are restrictive: methods whose clients send models and nothing else, and
rounded measures of test rows, if there are enough of them.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from fedblend.checks import Number
from fedblend.config.config import Config
from fedblend.config.schema.table import (
    Count,
    Index,
    NotNegative,
    Positive,
    Table,
    within,
)
from fedblend.config.schema.tables import LossName, Metric, Split
from fedblend.deploy.ops.settings import parse_as
from fedblend.errors import ConfigError, SettingError
from fedblend.registry import ALGORITHMS

Values = Mapping[str, Mapping[str, Mapping[str, float]]]
"""A measure by split, model and metric."""


def _known(name: str) -> str:
    if name not in ALGORITHMS:
        raise PydanticCustomError(
            "range",
            "{allowed}",
            {"allowed": "an algorithm; fedblend list algorithms has them"},
        )
    return name


def sends_updates_only(name: str) -> bool:
    """Whether a client of an algorithm sends nothing besides updates of the model."""
    return set(ALGORITHMS[name].sends) <= {"update"}


class Accept(Table):
    """Which experiments the node takes part in; "updates" stands for algorithms whose
    clients send updates of the model and nothing else.
    """

    algorithms: (
        Literal["any", "updates"] | list[Annotated[str, AfterValidator(_known)]]
    ) = "updates"
    losses: Literal["any"] | list[LossName] = "any"
    compress: bool = True
    select: bool = False
    upload: bool = False
    constants: bool = False
    min_rows: Index = 20
    max_rounds: Index = 1000
    max_message_bytes: Count = 100_000_000


class Protect(Table):
    """What is done to an update before it leaves the node."""

    clip: Positive | None = None
    noise: NotNegative = 0.0

    @model_validator(mode="after")
    def _noise_has_a_scale(self) -> "Protect":
        if self.noise and self.clip is None:
            raise SettingError("noise", "is in units of clip, which is missing")
        return self


class Metrics(Table):
    """Which measures are sent to the server."""

    names: Literal["any"] | list[Metric] = Field(default=["loss", "accuracy"])
    splits: list[Split] = Field(default=["test"])
    minimum_count: Index = 20
    round_to: Annotated[int, within(Number(least=0, most=15, whole=True))] = 3


class Policy(Table):
    """``policy.toml``: every table and every key may be left out."""

    accept: Accept = Accept()
    protect: Protect = Protect()
    metrics: Metrics = Metrics()

    def refusal(self, config: Config) -> str | None:
        """Why the node takes no part in an experiment, in one line, or None."""
        accept, run, loss = self.accept, config.run, config.model.loss
        name, algorithms = config.algorithm.name, accept.algorithms
        if algorithms == "updates":
            algorithms = [one for one in ALGORITHMS if sends_updates_only(one)]
        if not _allows(algorithms, name):
            return _line("accept.algorithms", "algorithm.name", name, algorithms)
        if not _allows(accept.losses, loss):
            return _line("accept.losses", "model.loss", loss, accept.losses)
        if config.compress is not None and not accept.compress:
            return _line("accept.compress", "compress", "a table", "no compression")
        if config.compress is not None and self.protect.clip is not None:
            # Encoders scale what was clipped, and memories of both sides must agree.
            allowed = "no compression of clipped updates"
            return _line("protect.clip", "compress", "a table", allowed)
        if config.select is not None and not accept.select:
            allowed = "the whole model; which rows of it a node uses is not disclosed"
            return _line("accept.select", "select", "a table", allowed)
        if config.central is not None and config.central.upload and not accept.upload:
            allowed = "a model and no gradients beside it"
            return _line("accept.upload", "central.upload", "true", allowed)
        if run.rounds > accept.max_rounds:
            allowed = f"at most {accept.max_rounds}"
            return _line("accept.max_rounds", "run.rounds", run.rounds, allowed)
        return None

    @property
    def discloses_constants(self) -> bool:
        """Whether constants of the loss are sent; clipping does not bound them."""
        return self.accept.constants and self.protect.clip is None

    def too_few(self, rows: int) -> str | None:
        """Why so many training rows are too few, in one line, or None.

        The experiment chooses how many of a node's rows are held out: with one row left
        to train on, every update reveals that row.
        """
        least = self.accept.min_rows
        if rows >= least:
            return None
        return _line("accept.min_rows", "training rows", "fewer", f"at least {least}")

    def disclosed(self, values: Values, counts: Mapping[str, int]) -> dict[str, Any]:
        """Those of these measures that may be sent, rounded.

        Args:
            values: measures by split, model and metric.
            counts: this node's rows in each split.
        """
        shown = self.metrics
        found = {
            split: {
                model: {
                    name: round(float(value), shown.round_to)
                    for name, value in measured.items()
                    if _allows(shown.names, name) and math.isfinite(value)
                }
                for model, measured in models.items()
            }
            for split, models in values.items()
            if split in shown.splits and counts.get(split, 0) >= shown.minimum_count
        }
        return {
            split: {model: measured for model, measured in models.items() if measured}
            for split, models in found.items()
            if any(models.values())
        }


def load_policy(path: Path) -> Policy:
    """Read ``policy.toml``; the same bytes are parsed once.

    Raises:
        ConfigError: one line with the file, the key, its value and what is allowed.
    """
    try:
        return _parsed(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


@lru_cache(maxsize=4)
def _parsed(data: bytes, path: Path) -> Policy:
    return parse_as(Policy, data, path)


def _allows(allowed: Literal["any"] | Sequence[str], name: str | None) -> bool:
    return allowed == "any" or name in allowed


def _line(key: str, where: str, value: Any, allowed: str | Sequence[str]) -> str:
    """One line: the key of the policy, what was asked for, what is allowed."""
    shown = "not given" if value is None else str(value)
    may = allowed if isinstance(allowed, str) else ", ".join(allowed) or "none"
    return f"policy {key}: {where} is {shown}; allowed: {may}"
