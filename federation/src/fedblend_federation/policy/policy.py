# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``policy.toml``: what the operator of a node permits.

The node reads the file once for every message, so that a change counts at once. The
defaults are restrictive: methods whose clients send models and nothing else, updates of
enough rows in batches that the server does not know, and rounded measures of test rows,
if there are enough of them and not too often. Only noise is a guarantee.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from fedblend.checks import Number
from fedblend.config.config import Config
from fedblend.config.imports import import_paths
from fedblend.config.table import (
    Index,
    NotNegative,
    Positive,
    Table,
    Word,
    limit,
    matching,
    misfit,
)
from fedblend.config.tables.federation import Federation
from fedblend.config.tables.privacy import ProtectRows
from fedblend.config.toml import LONGEST, parse
from fedblend.errors import ConfigError, SettingError
from fedblend.metrics import Metric
from fedblend.metrics import registry as metrics
from fedblend.registry import ALGORITHMS, OWN_MODEL
from fedblend_federation.client.executor import Executor, Measured
from fedblend_federation.ops.settings import parse_as

Values = Mapping[str, Mapping[str, Mapping[str, float]]]
"""A measure by split, model and metric."""
SENT = {
    name: one.facts
    for name, one in metrics.METRICS.items()
    if one.facts.bounded or one.facts.mean_of_rows
}
"""Metrics that a node may send: one row cannot move the others by more than is known.
The root of an error is left to the server, which has the error."""


MIN_SECURE_CLIP = 1.0
"""Least ``federation.secure_clip``: numbers that are clipped tell their signs."""
ROUNDS = 1000
"""Rounds that an experiment may have, unless ``budget.answers`` is very large."""


def _check_name(name: str) -> str:
    if name not in ALGORITHMS:
        raise misfit("an algorithm; fedblend list algorithms has them")
    return name


Disclosed = Literal["own_models", "upload", "constants", "statistics", "batches"]


class Accept(Table):
    """Which experiments the node takes part in; "updates" stands for algorithms whose
    clients send updates of the model and nothing else. ``discloses`` has what else may
    leave the node: a model that it trained alone at enrollment, which rows of a table
    it uses, gradients, constants of its loss, means of columns, which rows are in a
    batch. ``imports`` are the import paths of models and algorithms whose code the
    operator has read. ``fewest_rows`` counts training rows of the node, rows of a step
    times steps of a round, and test rows that are measured.
    """

    algorithms: (
        Literal["any", "updates"] | list[Annotated[str, AfterValidator(_check_name)]]
    ) = "updates"
    imports: list[Word] = Field(default=[])
    discloses: list[Disclosed] = Field(default=[])
    secure: bool = False
    min_cohort: Annotated[int, limit(Number(least=2, whole=True))] = 3
    colluding: Index = 0
    fewest_rows: Index = 20
    min_batch_rows: Index = 8

    @property
    def min_part_rows(self) -> int:
        """Training rows that an algorithm may set apart, at least."""
        return min(4, self.min_batch_rows)


class Rows(Table):
    """What an experiment may use of the rows.

    "file" stands for all columns of the table but target and client. Labels and the
    split are those of the first experiment that the node was enrolled in, and the rows
    of an experiment those that it began with, except for what ``changes`` lists.
    """

    columns: Literal["file", "any"] | list[Word] = "file"
    changes: list[Literal["labels", "split", "rows"]] = Field(default=[])


class Limits(Table):
    """What a request may cost; checked before anything is computed or allocated.

    All sizes follow from the memory, and the operations of one program from the time.
    """

    memory_gb: Positive = 8.0
    disk_gb: Positive = 20.0
    seconds: Positive = 3600.0

    @property
    def parameters(self) -> int:
        """Of a model: a node has some twelve copies in memory, and data as large."""
        return int(self.memory_gb * 12_500_000)

    @property
    def message_bytes(self) -> int:
        """Of a message; a longer one is not read."""
        return self.parameters

    @property
    def capacity_rows(self) -> int:
        """Rows of the largest node."""
        return max(int(self.memory_gb * 125_000), 1_000_000)

    @property
    def batch_rows(self) -> int:
        """Rows of a step."""
        return max(int(self.memory_gb * 12_500), 100_000)

    @property
    def operations(self) -> float:
        """Rows of all steps of a program, which nothing interrupts, times parameters.

        A slow core does so many in a second.
        """
        return self.seconds / 3600 * 1e12


class Budget(Table):
    """What the node gives over all experiments; the ledger counts it."""

    answers: Index = 100_000
    epsilon: Positive | None = None
    row_epsilon: Positive | None = None

    @property
    def rounds(self) -> int:
        """Rounds that an experiment may have, and training alone."""
        return max(ROUNDS, self.answers // 100)


class Protect(Table):
    """What is done to an update before it leaves the node."""

    clip: Positive | None = None
    noise: NotNegative = 0.0
    rows: ProtectRows = ProtectRows()

    @model_validator(mode="after")
    def _noise_has_a_scale(self) -> "Protect":
        if self.noise and self.clip is None:
            raise SettingError("noise", "is in units of clip, which is missing")
        return self


SentMetric = Annotated[str, matching(metrics.pattern(SENT), metrics.list_names(SENT))]


class Metrics(Table):
    """Which measures are sent to the server."""

    names: Literal["any"] | list[SentMetric] = Field(default=["loss", "accuracy"])
    round_to: Annotated[int, limit(Number(least=0, most=15, whole=True))] = 3
    bound: Positive = 100.0
    noise: NotNegative = 0.0
    total: Index = 500


class Policy(Table):
    """``policy.toml``: every table and every key may be left out."""

    accept: Accept = Accept()
    rows: Rows = Rows()
    limits: Limits = Limits()
    protect: Protect = Protect()
    metrics: Metrics = Metrics()
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _epsilon_needs_noise(self) -> "Policy":
        if self.budget.epsilon is not None and not self.protect.noise:
            raise SettingError("budget.epsilon", "needs protect.noise, which is 0")
        if self.budget.row_epsilon is not None and not self.protect.rows.noise:
            wrong = "needs protect.rows.noise, which is 0"
            raise SettingError("budget.row_epsilon", wrong)
        return self

    def import_refusal(self, text: str) -> str | None:
        """Why the node imports nothing for a configuration, in one line, or None.

        This comes before any check of the configuration: the keys of an algorithm by
        import path are known only when its module is imported.
        """
        if len(text.encode()) > LONGEST:
            raise ConfigError(f"message: a configuration above {LONGEST} bytes")
        content, allowed = parse(text, "message"), self.accept.imports
        for key, name in import_paths(content).items():
            if name not in allowed:
                return refusal_line("accept.imports", key, name, allowed)
            table = key.partition(".")[0]
            if "import_from" in content[table]:
                where = f"{table}.import_from"
                return refusal_line("accept.imports", where, "a folder", "none")
        return None

    def refusal(self, config: Config) -> str | None:
        """Why the node takes no part in an experiment, in one line, or None."""
        accept, run = self.accept, config.run
        name, algorithms = config.algorithm.name, accept.algorithms
        if algorithms == "updates":
            sent = {"update", OWN_MODEL}
            known = {one: set(its.sends) for one, its in ALGORITHMS.items()}
            if known.get(name) == sent and "own_models" not in accept.discloses:
                # The main methods of this library: what to set is said in full.
                allowed = 'no model of its own at enrollment, or "own_models"'
                return refusal_line("accept.discloses", "algorithm.name", name, allowed)
            sent -= set() if "own_models" in accept.discloses else {OWN_MODEL}
            algorithms = [one for one, sends in known.items() if sends <= sent]
        if not allows(algorithms, name) and name not in accept.imports:
            return refusal_line("accept.algorithms", "algorithm.name", name, algorithms)
        sums = config.federation or Federation()
        if accept.secure and not sums.secure:
            return refusal_line("accept.secure", "federation.secure", "false", "true")
        if sums.secure and sums.secure_clip < MIN_SECURE_CLIP:
            where, clip = "federation.secure_clip", sums.secure_clip
            return refusal_line("accept", where, clip, f"at least {MIN_SECURE_CLIP:g}")
        if config.compress is not None and self.protect.clip is not None:
            # Encoders scale what was clipped, and memories of both sides must agree.
            allowed = "no compression of clipped updates"
            return refusal_line("protect.clip", "compress", "a table", allowed)
        uploads = config.central is not None and config.central.upload
        if uploads and "upload" not in accept.discloses:
            allowed = "a model and no gradients beside it"
            return refusal_line("accept.discloses", "central.upload", "true", allowed)
        if getattr(config.data, "raw", None) and not self.discloses_statistics:
            allowed = "no statistics of columns"
            if self.protect.clip is not None:
                allowed += ", which protect.clip does not bound"
            return refusal_line("accept.discloses", "data.raw", "a table", allowed)
        if self.protect.rows.noise:
            try:
                config.require_gradients("policy protect.rows")
            except SettingError as error:
                return str(error)
        alone = config.measure.local
        for where, rounds in (("run.rounds", run.rounds), ("measure.local", alone)):
            if rounds is not True and rounds > self.budget.rounds:
                allowed = f"at most {self.budget.rounds}"
                return refusal_line("budget.answers", where, rounds, allowed)
        return None

    @property
    def discloses_constants(self) -> bool:
        """Whether constants of the loss are sent; clipping does not bound them."""
        return "constants" in self.accept.discloses and self.protect.clip is None

    @property
    def discloses_statistics(self) -> bool:
        """Whether means of columns are sent; clipping does not bound them."""
        return "statistics" in self.accept.discloses and self.protect.clip is None

    def disclose(self, values: Values, counts: Mapping[str, int]) -> dict[str, Any]:
        """The measures of test rows that may be sent, with noise, rounded.

        Args:
            values: measures by split, model and metric.
            counts: this node's rows in each split.
        """
        rows = counts.get("test", 0)
        if rows < max(self.accept.fewest_rows, 1):
            return {}
        shown = {
            model: self._round(measured, rows)
            for model, measured in values.get("test", {}).items()
        }
        sent = {model: measured for model, measured in shown.items() if measured}
        return {"test": sent} if sent else {}

    def _round(self, measured: Mapping[str, float], rows: int) -> dict[str, float]:
        return {
            name: round(self._perturb(facts, float(value), rows), self.metrics.round_to)
            for name, value in measured.items()
            if (facts := SENT.get(name.partition("@")[0])) and self._sends(name, facts)
            # A value decides this only where no noise is promised.
            if facts.always_defined or math.isfinite(value)
        }

    def _sends(self, name: str, facts: Metric) -> bool:
        """Whether a metric may be sent; noise is for means, and hides single rows."""
        noisy = facts.mean_of_rows or not self.metrics.noise
        return allows(self.metrics.names, name) and noisy

    def _perturb(self, facts: Metric, value: float, rows: int) -> float:
        """A mean over rows with noise, in units of how far one row can move it.

        A value that is not finite counts as the worst one, and is not left out: its
        absence would tell of a single row at any noise.
        """
        shown = self.metrics
        most = 1.0 if facts.bounded else shown.bound
        if not math.isfinite(value):
            value = 0.0 if facts.higher_is_better else most
        if not shown.noise:
            return value
        return value + secrets.SystemRandom().gauss(0, shown.noise * most / rows)


def load_policy(path: Path) -> Policy:
    """Read ``policy.toml``; the same bytes are parsed once.

    Raises:
        ConfigError: one line with the file, the key, its value and what is allowed.
    """
    try:
        return _parse(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


@lru_cache(maxsize=16)
def _parse(data: bytes, path: Path) -> Policy:
    return parse_as(Policy, data, path)


def allows(allowed: Literal["any"] | Sequence[str], name: str | None) -> bool:
    """Whether a name is among those that are allowed."""
    return allowed == "any" or name in allowed


def refusal_line(key: str, where: str, value: Any, allowed: str | Sequence[str]) -> str:
    """One line: the key of the policy, what was asked for, what is allowed."""
    shown = "not given" if value is None else str(value)
    may = allowed if isinstance(allowed, str) else ", ".join(allowed) or "none"
    return f"policy {key}: {where} is {shown}; allowed: {may}"


class Refusal(ValueError):
    """A node does not do what a message asks, and why: one line.

    Args:
        reason: what the server gets to know.
        detail: what the node's own audit gets to know, if that is more.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail or reason


class Permissions(NamedTuple):
    """What the operator of a node permits, for one message."""

    describe: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From the fields of a message to the node's description, or a ``Refusal``."""
    executor: Callable[[Mapping[str, Any]], Executor]
    """From the terms of an experiment to what computes it, or a ``Refusal``."""
    disclose: Callable[[Measured, dict[str, int]], Measured]
    """Those of the measures that may leave the node; also given the rows of a split."""
    secure: Callable[[Mapping[str, Any]], Any] = lambda terms: None
    """From the terms of an experiment to what its secure sums need, see
    ``secure.client``; None for an experiment without them."""
    policy: Policy = Policy()
    """Limits on messages, on the disk, and on what leaves over all experiments."""
