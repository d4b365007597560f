# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The ledger of a node: what it has given away, over all experiments.

One file counts answers, the rows they were computed from, measurements, seconds, and
the privacy that answers with noise cost. It is written whole, before an answer leaves.
A message that comes again is not counted again: its answer is on disk, or the ledger
remembers that the newest answer of its experiment was the one to this message. A
message that is repeated after another one is counted again.

Noise of z clips on an answer of norm C at most is a Gaussian mechanism: other rows move
the answer by 2 C. Answers compose to one Gaussian mechanism whose mu^2 is the sum of
(2 / z)^2, see ``theory.privacy``. Noise on gradients of rows is counted beside it, for
one row, in ``row_steps``.
"""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedblend.errors import RunError
from fedblend.simulation.serialize import DAMAGE, WireError, write_atomically
from fedblend.theory.privacy import gaussian_epsilon, row_epsilon
from fedblend_federation.ops.audit import hash_json

if TYPE_CHECKING:
    from fedblend_federation.policy.policy import Policy

FILE = "ledger.json"
DELTA = 1e-6
"""At which epsilon is counted."""
EXPERIMENTS, MEASURES = 1000, 50
"""Experiments that a node enrolls in, ever, and measurements of one of them."""
SUMS = 1000
"""Secure sums whose models and cohorts are remembered."""


class Charge(NamedTuple):
    """What one request costs."""

    answers: int = 0
    rows: int = 0
    measures: int = 0
    squared: float = 0.0
    """mu^2 of the noise on an answer; infinite where there is none."""
    measures_squared: float = 0.0
    row_steps: Mapping[str, int] = {}
    """Evaluations of noisy gradients, by ``row_key``."""
    bare_rows: bool = False
    """Gradients had no noise for rows."""


@dataclasses.dataclass
class Account:
    """What one experiment got so far."""

    began: float = 0.0
    seen: float = 0.0
    """When its newest message came, in seconds since 1970."""
    age: float = 0.0
    """That of the ledger then."""
    answers: int = 0
    measures: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    """Seconds of its longest request."""
    newest: str = ""
    """The digest of the newest request that was counted."""
    over: bool = False
    """The server stopped it or measured for the last time, and asked no more since."""


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.time()


@dataclasses.dataclass
class Ledger:
    """The counts of a node; ``accounts`` are those of experiments on its disk."""

    experiments: int = 0
    answers: int = 0
    rows: int = 0
    measures: int = 0
    seconds: float = 0.0
    unprotected: int = 0
    """Answers without noise: for them there is no epsilon."""
    squared: float = 0.0
    """The sum of mu^2 of answers with noise, and of measures."""
    measures_squared: float = 0.0
    unprotected_measures: int = 0
    row_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    bare_rows: int = 0
    """Answers whose gradients had no noise for rows."""
    misfits: list[str] = dataclasses.field(default_factory=list)
    """Hashes of descriptions of rows that the node's rows did not fit."""
    age: float = 0.0
    """Seconds that passed by both clocks since the ledger began."""
    clocks: tuple[float, float] = dataclasses.field(default_factory=_clocks)
    """Since the machine started, and since 1970, when ``age`` was counted."""
    accounts: dict[str, Account] = dataclasses.field(default_factory=dict)
    opened: dict[str, int] = dataclasses.field(default_factory=dict)
    """The newest round of which a secure sum was opened, by experiment: also of those
    that are no longer on the disk."""
    sums: list[list[str]] = dataclasses.field(default_factory=list)
    """A name of the model, the largest weight, and the cohort as the bits of a
    hexadecimal number, of the newest secure sums that were opened."""

    def account(self, experiment: str) -> Account:
        """The account of an experiment, a new one if there is none."""
        if experiment not in self.accounts:
            self.experiments += 1
            self.accounts[experiment] = Account(began=time.time())
        return self.accounts[experiment]

    def count_age(self) -> float:
        """Its age, counted to now; a clock that is set, or a restart, adds nothing."""
        now = _clocks()
        self.age += max(0.0, min(n - b for n, b in zip(now, self.clocks, strict=True)))
        self.clocks = now
        return self.age

    def refusal(self, policy: "Policy", experiment: str, charge: Charge) -> str:
        """Why a request is refused, in one line; empty if it is not."""
        own, most = self.accounts.get(experiment, Account()), policy.budget
        new, asked = experiment not in self.accounts, charge.measures
        for key, used, wanted, limit in (
            ("limits.seconds", own.longest, 0, policy.limits.seconds),
            ("budget", self.experiments, new, EXPERIMENTS),
            ("budget.answers", self.answers, charge.answers, most.answers),
            ("metrics", own.measures, asked, MEASURES),
            ("metrics.total", self.measures, asked, policy.metrics.total),
        ):
            if used + wanted > limit:
                return f"policy {key}: {used:g} so far; allowed: at most {limit:g}"
        if most.epsilon is not None and charge.answers:
            spent = gaussian_epsilon(self.squared + charge.squared, DELTA)
            if spent > most.epsilon:
                return (
                    f"policy budget.epsilon: {spent:.4g} with this answer; allowed: at "
                    f"most {most.epsilon:g}"
                )
        if most.row_epsilon is not None and charge.row_steps:
            spent = self.row_epsilon(DELTA, charge.row_steps)
            if spent > most.row_epsilon:
                return (
                    f"policy budget.row_epsilon: {spent:.4g} with this answer; "
                    f"allowed: at most {most.row_epsilon:g}"
                )
        return ""

    def row_epsilon(self, delta: float, more: Mapping[str, int] = {}) -> float:
        """Epsilon of a training row, with the evaluations of a further answer."""
        both = Counter(self.row_steps) + Counter(more)
        return row_epsilon({_pair(key): both[key] for key in both}, delta)

    def charge(
        self, experiment: str, digest: str, charge: Charge, seconds: float = 0.0
    ) -> None:
        """Count a request that was answered, unless it is the newest one again."""
        own = self.account(experiment)
        own.seen, own.age, own.over = time.time(), self.count_age(), False
        own.seconds += seconds
        own.longest = max(own.longest, seconds)
        self.seconds += seconds
        if own.newest == digest:
            return
        own.newest = digest
        own.answers += charge.answers
        own.measures += charge.measures
        self.answers += charge.answers
        self.rows += charge.rows
        self.measures += charge.measures
        if charge.answers:
            self.squared, self.unprotected = _sum_squares(
                self.squared, self.unprotected, charge.squared, charge.answers
            )
        for key, steps in charge.row_steps.items():
            self.row_steps[key] = self.row_steps.get(key, 0) + steps
        self.bare_rows += charge.bare_rows
        if charge.measures:
            self.measures_squared, self.unprotected_measures = _sum_squares(
                self.measures_squared,
                self.unprotected_measures,
                charge.measures_squared,
                charge.measures,
            )

    def enter_sum(
        self, experiment: str, round: int, model: str, weights: str, cohort: list[int]
    ) -> None:
        """Remember a secure sum that is about to be opened."""
        self.opened[experiment] = max(round, self.opened.get(experiment, round))
        entry = [model, weights, f"{_bits(cohort):x}"]
        if entry not in self.sums:
            self.sums = [*self.sums, entry][-SUMS:]

    def nearest(self, model: str, weights: str, cohort: list[int]) -> float:
        """By how many clients the nearest cohort of another sum of a model differs."""
        own = _bits(cohort)
        others = [
            (int(bits, 16) ^ own).bit_count()
            for name, by, bits in self.sums
            if name == model and (by, int(bits, 16)) != (weights, own)
        ]
        return min(others, default=inf)

    def lines(self) -> list[str]:
        """The ledger for its operator."""
        noisy = (
            f"epsilon {gaussian_epsilon(self.squared, DELTA):.4g} at delta {DELTA:g}"
        )
        spent = f"no guarantee: {self.unprotected} answers without noise"
        measured = gaussian_epsilon(self.measures_squared, DELTA)
        of_rows = f"epsilon {measured:.4g} of a test row"
        shown = f"no guarantee: {self.unprotected_measures} measurements without noise"
        of_train = f"epsilon {self.row_epsilon(DELTA):.4g} of a training row"
        bare = f"no guarantee: {self.bare_rows} answers without noise for rows"
        totals = (
            f"{self.experiments} experiments, {self.answers} answers from "
            f"{self.rows} rows, {self.measures} measurements, {self.seconds:.0f} s"
        )
        return [
            totals,
            f"answers: {spent if self.unprotected else noisy}",
            f"rows: {of_train if not self.bare_rows else bare}",
            f"measurements: {shown if self.unprotected_measures else of_rows}",
            *(
                f"{name}: {own.answers} answers, {own.measures} measurements, "
                f"{own.seconds:.0f} s, newest {day}" + (", over" if own.over else "")
                for name, own in self.accounts.items()
                for day in [time.strftime("%Y-%m-%d %H:%M", time.gmtime(own.seen))]
            ),
        ]

    def write(self, folder: Path) -> None:
        """Put it on disk, whole."""
        content = dataclasses.asdict(self)
        data = {"ledger": content, "sha256": hash_json(content)}
        write_atomically(folder / FILE, json.dumps(data).encode())


def read_ledger(folder: Path) -> Ledger:
    """The ledger of a node; a new one if there is no file.

    Raises:
        WireError: the file is not what was written; nothing may leave the node then.
    """
    try:
        data = json.loads((folder / FILE).read_bytes())
        content = data["ledger"]
        if data["sha256"] != hash_json(content):
            raise ValueError("sha256")
        accounts = {name: Account(**own) for name, own in content["accounts"].items()}
        return Ledger(**(content | {"accounts": accounts}))
    except FileNotFoundError:
        return Ledger()
    except DAMAGE:
        raise WireError(
            "ledger: the file is damaged on the disk of this node"
        ) from None


def ledger_lines(folder: Path) -> list[str]:
    """The ledger of a node, line by line.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        return read_ledger(folder).lines()
    except (WireError, OSError) as error:
        raise RunError(f"{folder / FILE}: {error}") from None


def row_key(noise: float, share: float) -> str:
    """A key of ``row_steps``: the noise, and the chance of a row, rounded up."""
    return f"{noise!r} {min(1.0, ceil(share * 1e6) / 1e6)!r}"


def _pair(key: str) -> tuple[float, float]:
    noise, share = map(float, key.split())
    return noise, share


def _sum_squares(
    total: float, open: int, squared: float, number: int
) -> tuple[float, int]:
    return (total, open + number) if squared == inf else (total + squared, open)


def _bits(cohort: list[int]) -> int:
    return sum(1 << client for client in cohort)
