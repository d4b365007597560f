# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Two ways to read one number from the curves of a method: theirs, and an honest one.

A quarter of each client's rows does not train. It is halved into validation and test
rows, and each measurement counts the rows of either half that are right. Accuracies are
over all rows of all clients.

*Theirs* (the published tables): the published rate, and the round at which the model is
best on all of these rows, which are also the rows that are reported.

*Honest*: rate and round are chosen on validation rows and reported on test rows; then
the halves change places, and both together are the number. The same rows are reported,
no row chose the model that it is counted for, and the training is the same: what the
two protocols differ by is the choice alone. Every method has the same trials: a run of
each rate, of a quarter of the rounds and with a seed of its own, chooses the rate; the
reported seeds run with the rate that was chosen.

*What choosing on test rows is worth* is the same procedure with both choices made on
all of these rows, minus the honest number.

*Patience*: a run may stop early, where none of these choices has found a better round
for some rounds. What a run reports then is what it would report of all its rounds,
unless it gets better again after that pause. PFLlib's program has such a rule too.

A *paired interval* compares two methods: clients and seeds are drawn again with
replacement, 95 % of the differences of accuracies lie within.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

CHOICES: dict[str, tuple[int, ...]] = {"validation": (0,), "test": (1,), "all": (0, 1)}
"""Which halves of the rows choose, by name; 0 are validation rows."""


def choose(correct: np.ndarray, rounds: Sequence[int]) -> dict[str, Any]:
    """The best round of one run by each choice, the earliest of equals.

    Args:
        correct: right rows, [measurements, 2 halves, clients].
        rounds: of the measurements.

    Returns:
        For each of ``CHOICES`` the round, the right rows that chose it (``score``), and
        the right rows of each client among those that are reported: the other half, or
        all.
    """
    found = {}
    for name, halves in CHOICES.items():
        scores = correct[:, halves].sum(axis=(1, 2))
        look = int(scores.argmax())
        reported = (0, 1) if len(halves) == 2 else (1 - halves[0],)
        found[name] = {
            "round": int(rounds[look]),
            "score": int(scores[look]),
            "correct": correct[look, reported].sum(axis=0).astype(int).tolist(),
        }
    return found


def stops_at(correct: np.ndarray, rounds: Sequence[int], patience: int) -> int | None:
    """The number of measurements after which a run stops early, or None.

    Args:
        correct: right rows, [measurements, 2 halves, clients].
        rounds: of the measurements.
        patience: rounds without a better one by any choice.
    """
    best, since = dict.fromkeys(CHOICES, -1), 0
    for look, (here, number) in enumerate(zip(correct, rounds, strict=True)):
        scores = {name: int(here[list(of)].sum()) for name, of in CHOICES.items()}
        if any(scores[name] > best[name] for name in CHOICES):
            best = {name: max(scores[name], best[name]) for name in CHOICES}
            since = number
        elif number - since >= patience:
            return look + 1
    return None


def chosen_rates(tuning: Mapping[float, dict[str, Any]]) -> dict[str, float]:
    """The best rate by each choice, the first of equals.

    Args:
        tuning: by rate, ``choose`` of the run that tries it.
    """
    return {
        name: max(tuning, key=lambda rate: tuning[rate][name]["score"])
        for name in CHOICES
    }


def honest(
    rates: Mapping[str, float], runs: Mapping[float, dict[str, Any]]
) -> np.ndarray:
    """The right rows of each client under the honest protocol, for one seed.

    Args:
        rates: of ``chosen_rates``.
        runs: by rate, ``choose`` of this seed's runs.
    """
    halves = [runs[rates[name]][name]["correct"] for name in ("validation", "test")]
    return np.sum(halves, axis=0)


class Difference(NamedTuple):
    """A method minus another, in accuracy, and its paired interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the interval is on one side of 0."""
        if self.low > 0:
            return "ahead"
        return "behind" if self.high < 0 else "undecided"


def difference(
    ours: np.ndarray, other: np.ndarray, rows: np.ndarray, draws: int = 4000
) -> Difference:
    """The paired difference of two methods.

    Args:
        ours: right rows, [seeds, clients].
        other: right rows of the other method, for the same seeds and clients.
        rows: of the clients.
        draws: of seeds and clients, with replacement.
    """
    gaps, random = ours - other, np.random.default_rng(0)
    seeds, clients = gaps.shape
    by_seed = random.multinomial(seeds, np.full(seeds, 1 / seeds), draws)
    by_client = random.multinomial(clients, np.full(clients, 1 / clients), draws)
    drawn = np.einsum("ds,sc,dc->d", by_seed, gaps, by_client)
    drawn = drawn / (seeds * by_client @ rows)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Difference(gaps.sum() / (seeds * rows.sum()), float(low), float(high))
