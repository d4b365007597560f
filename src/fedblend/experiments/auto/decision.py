# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What to deploy, who gains, and how sure that is: a rule that is fixed beforehand.

*What to deploy.* Validation rows decide: of the methods that cannot be told apart from
the best one, the simplest, in the order of ``candidates``. Training alone is the
simplest of all; a method that scores worse than it on average is no choice, and where
the best one is clearly better than training alone, the choice has to be so as well. A
method is told apart if it is worse by more than a negligible part of what the best one
gains over a constant prediction, at 5 % after Holm's correction for all comparisons
with the best.
The test is Wilcoxon's signed-rank test over clients, of their means over splits: one
unlike client does not hide what the others show. Fewer than 10 clients are no sample;
they are compared over splits, by Student's t with the correction of Nadeau and Bengio
for splits that overlap.

*Who gains.* Test rows tell, for every client with enough of them: its interval from
``gains`` over single rows, for the mean of splits that depend on each other as Nadeau
and Bengio have it (``gains`` takes the worst case), at 5 % after Holm's correction for
all clients.
A client is called harmed only where all splits agree, and there are two or more.

*Nothing.* Where the best method is not clearly better than a constant prediction, the
table does not tell what to deploy.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.build import Built
from fedblend.experiments import differences
from fedblend.experiments.auto.candidates import (
    ALONE,
    BY_NAME,
    FEW_CLIENTS,
    TEST,
    VALIDATION,
)
from fedblend.experiments.auto.constant import constant_losses
from fedblend.experiments.auto.description import JUDGED
from fedblend.experiments.differences import LEVEL, Difference, holm
from fedblend.gains import Gain

NEGLIGIBLE = 0.02
"""The part of what the best method gains over a constant prediction."""
HELD = TEST / (1 - TEST - VALIDATION)
"""Rows held out over rows trained on: by so much the splits depend on each other."""

SHARED = TEST / (1 - VALIDATION)
"""How much the results of two splits depend on each other, by Nadeau and Bengio."""


class Choice(NamedTuple):
    """What validation rows decide."""

    method: str
    best: str
    alike: list[str]
    """Methods that cannot be told apart from the best, which is one of them."""
    p: dict[str, float]
    """That each other method is worse than the best, corrected."""


class Clients(NamedTuple):
    """Who gains by a method over training alone; names of clients."""

    gain: list[str]
    harmed: list[str]
    undecided: int
    """Clients whose rows do not tell."""
    small: int
    """Clients too small to be judged by themselves."""
    better: int = 0
    """Clients whose mean over splits is better, however sure that is."""
    measured: int = 0
    """Clients that have test rows."""


class Findings(NamedTuple):
    """All that a verdict says."""

    choice: Choice
    versus_alone: str
    """The method that training alone is compared with: the chosen one, or where that is
    training alone the best of the others."""
    informative: bool
    """Whether the best method is clearly better than a constant prediction."""
    clients: int
    splits: int
    who: Clients
    """Who gains by ``versus_alone``."""
    shared_harms: list[str]
    """Clients that FedAvg's one model harms."""
    mean_gain: tuple[float, float, float]
    """Of ``versus_alone`` over training alone, and its 95 % interval."""
    p: float
    comparisons: int

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self._asdict(),
            "choice": self.choice._asdict(),
            "who": self.who._asdict(),
        }


def decide(
    folders: Mapping[str, Path], built: Built, metric: str
) -> tuple[Findings, list[Difference]]:
    """Apply the rule to finished runs.

    Args:
        folders: by method; training alone is one of them.
        built: the data, with the splits of the runs.
        metric: the criterion; less is better.

    Returns:
        What is found, and what every method gains over training alone.
    """
    values = {
        split: {name: read_values(of, split, metric) for name, of in folders.items()}
        for split in ("validation", "test")
    }
    constants = {split: _constants(built, split) for split in values}
    choice = choose(values["validation"], _mean(constants["validation"]))
    informative = all(
        beats_constant(of[choice.best], constants[split])
        for split, of in values.items()
    )
    found = differences.contenders(folders)
    found.pop(differences.ALONE, None)
    every = differences.compared(found, [metric], reference=ALONE)
    gains = {one.name: one for one in every}
    alone = found[ALONE]
    names = [built.federated_data.name(int(client)) for client in alone.saved.ids]

    def who(method: str) -> Clients:
        by_split = alone.values(metric) - found[method].values(metric)
        judged = alone.saved.counts >= JUDGED
        return judge(gains[method].gain, by_split, names, judged)

    others = {name: of for name, of in values["validation"].items() if name != ALONE}
    method = choose(others).best if choice.method == ALONE else choice.method
    tested = {name: values["test"][ALONE] - values["test"][name] for name in others}
    return Findings(
        choice=choice,
        versus_alone=method,
        informative=informative,
        clients=int(np.isfinite(gains[method].gain.value).sum()),
        splits=len(built.federations),
        who=who(method),
        shared_harms=who("fedavg").harmed,
        mean_gain=interval(gains[method].gain, tested[method]),
        p=_corrected(tested)[method],
        comparisons=len(tested),
    ), every


def _constants(built: Built, split: str) -> np.ndarray:
    """The losses of the better constant prediction, [splits, clients]."""
    task = built.task
    each = [
        constant_losses(data, task.kind, task.outputs, split)
        for data in built.federations
    ]
    return min(np.stack(each, axis=1), key=_mean)


def read_values(folder: Path, split: str, metric: str) -> np.ndarray:
    """A metric of every client's own model in a finished run, [seeds, clients].

    NaN of a client without rows; infinite where its model is not finite.
    """
    by_seed: dict[str, list[float]] = {}
    with (folder / "clients.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            cell = row[f"{split}_personal_{metric}"]
            missing = "inf" if int(row[split]) else "nan"
            by_seed.setdefault(row["seed"], []).append(float(cell or missing))
    return np.array(list(by_seed.values()))


def told_apart(gaps: np.ndarray) -> float:
    """The p-value that differences, [splits, clients], are above zero; two-sided.

    Differences are NaN where they are not known. Where they point the other way, the
    p-value is 1: nothing says that they are above zero.
    """
    gaps = gaps[:, np.isfinite(gaps).all(axis=0)]
    splits, clients = gaps.shape
    if not clients or not np.any(gaps) or (clients < FEW_CLIENTS and splits < 2):
        return 1.0
    from scipy import stats

    if clients >= FEW_CLIENTS:
        means = gaps.mean(axis=0)
        found: Any = stats.wilcoxon(means, zero_method="zsplit", alternative="greater")
        return min(2 * float(found.pvalue), 1.0)
    score = gaps.mean() / max(_error(gaps), 1e-12)
    return min(2 * float(stats.t.sf(score, splits - 1)), 1.0)


def _error(gaps: np.ndarray) -> float:
    """The standard error of the mean of differences, [splits, clients], over splits."""
    splits = len(gaps)
    if splits < 2:
        return float("inf")
    return float(gaps.mean(axis=1).std(ddof=1) * np.sqrt(1 / splits + HELD))


def interval(gain: Gain, gaps: np.ndarray) -> tuple[float, float, float]:
    """The mean of differences, and the ends of its 95 % interval.

    That of ``gains``, as in all tables and on the page; few clients have one over
    splits.

    Args:
        gain: what clients gain.
        gaps: the same in every split, [splits, clients].
    """
    from scipy import stats

    gaps = gaps[:, np.isfinite(gaps).all(axis=0)]
    splits, clients = gaps.shape
    if not clients or clients >= FEW_CLIENTS:
        return gain.mean
    mean = float(gaps.mean())
    half = float(stats.t.ppf(0.975, max(splits - 1, 1))) * _error(gaps)
    return mean, mean - half, mean + half


def choose(values: Mapping[str, np.ndarray], constant: float = np.inf) -> Choice:
    """The simplest method that cannot be told apart from the best.

    Args:
        values: of each method, [splits, clients], on validation rows; less is better.
        constant: the value of a constant prediction.
    """
    means = {name: _mean(of) for name, of in values.items()}
    best = min(means, key=lambda name: means[name])
    little = NEGLIGIBLE * max(constant - means[best], 0) if constant < np.inf else 0.0
    others = [name for name in values if name != best]
    p = _corrected({name: values[name] - values[best] for name in others})

    def like_best(name: str) -> bool:
        if name == best or not np.isfinite(means[name]):
            return name == best
        return p[name] >= LEVEL or means[name] - means[best] <= little

    alike = [name for name in BY_NAME if name in values and like_best(name)]
    alone = means.get(ALONE, np.inf)
    pays = [name for name in alike if means[name] <= alone]
    if ALONE in values and ALONE not in alike:
        sure = _corrected({name: values[ALONE] - values[name] for name in pays})
        pays = [name for name in pays if name == best or sure[name] < LEVEL]
    return Choice(pays[0], best, alike, p)


def _corrected(gaps: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The p-values of several differences, corrected together."""
    found = holm([told_apart(of) for of in gaps.values()])
    return dict(zip(gaps, map(float, found), strict=True))


def _mean(values: np.ndarray) -> float:
    """The mean over splits and clients that are measured; infinite if not finite."""
    known = values[:, ~np.isnan(values).all(axis=0)]
    mean = float(np.mean(known)) if known.size else np.inf
    return mean if np.isfinite(mean) else np.inf


def beats_constant(values: np.ndarray, constants: np.ndarray) -> bool:
    """Whether values, [splits, clients], are clearly below those of a constant."""
    return _mean(values) < _mean(constants) and told_apart(constants - values) < LEVEL


def judge(
    gain: Gain, by_split: np.ndarray, names: Sequence[str], judged: np.ndarray
) -> Clients:
    """Who gains, and who is harmed, at 5 % for all clients together.

    Args:
        gain: of every client, over training alone, with its 95 % interval.
        by_split: the gains in each split, [splits, clients].
        names: of the clients.
        judged: which of them have enough rows.
    """
    from scipy.special import ndtr, ndtri

    known = judged & np.isfinite(gain.value)
    side = np.where(gain.value > 0, gain.value - gain.low, gain.high - gain.value)
    splits = len(by_split)
    side = side * np.sqrt(1 / splits + (1 - 1 / splits) * SHARED)
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = ndtri(0.975) * np.abs(gain.value) / side
    clear = holm(np.where(known, 2 * ndtr(-scores), np.nan).tolist()) < LEVEL
    several = splits > 1
    up = clear & (by_split > 0).all(axis=0)
    down = clear & (by_split < 0).all(axis=0) & several
    gain_names, harmed_names = (
        [names[int(place)] for place in np.flatnonzero(which)] for which in (up, down)
    )
    undecided = int(known.sum()) - len(gain_names) - len(harmed_names)
    small = len(names) - int(known.sum())
    better, measured = (gain.value > 0).sum(), np.isfinite(gain.value).sum()
    who = gain_names, harmed_names, undecided, small
    return Clients(*who, better=int(better), measured=int(measured))
