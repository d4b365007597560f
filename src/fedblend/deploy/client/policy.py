# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``policy.toml``: what the operator of a node agrees to.

The node reads it before every message, so that a change counts at once. The defaults
are restrictive: methods whose clients send models and nothing else, and rounded
measures of test rows, if there are enough of them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from fedblend.checks import Number
from fedblend.config.config import Config
from fedblend.config.schema.table import (
    Count,
    Index,
    Misfit,
    NotNegative,
    Positive,
    Table,
    within,
)
from fedblend.config.schema.tables import LossName, Metric, Split
from fedblend.deploy.ops.settings import load_as
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
    """What is done to an answer before it leaves."""

    clip: Positive | None = None
    noise: NotNegative = 0.0

    @model_validator(mode="after")
    def _noise_has_a_scale(self) -> "Protect":
        if self.noise and self.clip is None:
            raise Misfit("noise", "is in units of clip, which is missing")
        return self


class Metrics(Table):
    """Which measures the server is told."""

    names: Literal["any"] | list[Metric] = Field(default=["loss", "accuracy"])
    splits: list[Split] = Field(default=["test"])
    minimum_count: Index = 20
    round_to: Annotated[int, within(Number(least=0, most=15, whole=True))] = 3


class PolicyFile(Table):
    """``policy.toml``: every table and every key may be left out."""

    accept: Accept = Accept()
    protect: Protect = Protect()
    metrics: Metrics = Metrics()


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a node agrees to, and what it does to what leaves it."""

    accept: Accept = dataclasses.field(default_factory=Accept)
    protect: Protect = dataclasses.field(default_factory=Protect)
    told: Metrics = dataclasses.field(default_factory=Metrics)

    def refusal(self, config: Config) -> str | None:
        """Why the node takes no part in an experiment, in one line, or None."""
        accept, run = self.accept, config.run
        name, allowed = config.algorithm.name, accept.algorithms
        if allowed == "updates":
            allowed = [one for one in ALGORITHMS if sends_updates_only(one)]
        if not _allows(allowed, name):
            return _refused("accept.algorithms", "algorithm.name", name, allowed)
        if not _allows(accept.losses, config.model.loss):
            return _refused(
                "accept.losses", "model.loss", config.model.loss, accept.losses
            )
        if config.compress is not None and not accept.compress:
            return _refused("accept.compress", "compress", "a table", "no compression")
        if config.compress is not None and self.protect.clip is not None:
            # Encoders scale what was clipped, and memories of both sides must agree.
            allowed = "no compression of clipped answers"
            return _refused("protect.clip", "compress", "a table", allowed)
        if config.select is not None and not accept.select:
            allowed = "the whole model; which rows of it a node uses is not told"
            return _refused("accept.select", "select", "a table", allowed)
        if config.central is not None and config.central.upload and not accept.upload:
            allowed = "a model and no gradients beside it"
            return _refused("accept.upload", "central.upload", "true", allowed)
        if run.rounds > accept.max_rounds:
            allowed = f"at most {accept.max_rounds}"
            return _refused("accept.max_rounds", "run.rounds", run.rounds, allowed)
        return None

    @property
    def constants(self) -> bool:
        """Whether constants of the loss are told; nothing clips or blurs them."""
        return self.accept.constants and self.protect.clip is None

    def too_few(self, rows: int) -> str | None:
        """Why so many training rows do not do, in one line, or None.

        The experiment says how many of a node's rows are held out: with one row left
        to train on, every answer tells that row.
        """
        least = self.accept.min_rows
        if rows >= least:
            return None
        allowed = f"at least {least}"
        return _refused("accept.min_rows", "training rows", "fewer", allowed)

    def oversize(self, size: int) -> str | None:
        """Why a message of that many bytes is not taken, in one line, or None."""
        most = self.accept.max_message_bytes
        if size <= most:
            return None
        allowed = f"at most {most}"
        return _refused("accept.max_message_bytes", "message bytes", size, allowed)

    def metrics(self, values: Values, counts: Mapping[str, int]) -> dict[str, Any]:
        """What of these measures may be told, rounded.

        Args:
            values: measures by split, model and metric.
            counts: this node's rows in each split.
        """
        told = self.told
        enough = [
            split
            for split in values
            if split in told.splits and counts.get(split, 0) >= told.minimum_count
        ]
        found = {
            split: {
                model: {
                    name: round(float(value), told.round_to)
                    for name, value in measured.items()
                    if _allows(told.names, name) and math.isfinite(value)
                }
                for model, measured in values[split].items()
            }
            for split in enough
        }
        return {
            split: {model: measured for model, measured in models.items() if measured}
            for split, models in found.items()
            if any(models.values())
        }


def load_policy(path: Path) -> Policy:
    """Read ``policy.toml``.

    Raises:
        ConfigError: one line with the file, the key, its value and what is allowed.
    """
    tables = load_as(PolicyFile, path)
    return Policy(tables.accept, tables.protect, tables.metrics)


def _allows(allowed: Literal["any"] | Sequence[str], asked: str | None) -> bool:
    return allowed == "any" or asked in allowed


def _refused(key: str, where: str, asked: Any, allowed: Any) -> str:
    """One line: the key of the policy, what was asked, what is allowed."""
    said = "not said" if asked is None else str(asked)
    may = allowed if isinstance(allowed, str) else ", ".join(allowed) or "none"
    return f"policy {key}: {where} is {said}; allowed: {may}"
