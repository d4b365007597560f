# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The rule of ``fedblend auto``: what to deploy, who gains, how sure that is.

It is fixed beforehand, and ``sentences`` says what it finds.

*Gate.* A method whose models are not finite, or that is worse than both constant
predictions on validation rows by more than chance may do, is not trained, and takes no
part in what follows; training alone may be as bad as that, of few rows. Without
training alone there is nothing to compare with, and no verdict.

*Candidate.* Validation rows choose one federated method: the simplest, in the order of
``candidates``, of those that are as good as the best one: worse by less than a quarter
of a percent of what the best one gains over a constant prediction; or by less than a
tenth of that gain and 2 % of its score, where that may be chance: 20 % by the test
below, or 5 % where the best one is an extension, with one more setting that validation
rows chose.

*Alone* is the linear model of each client, or boosted trees on its own rows where these
are better on validation rows by more than 2 % of what they gain over a constant.

*The question that decides.* Is the candidate better than training alone, on test rows?
One test, once, one-sided, at 5 %: Wilcoxon's signed-rank test over clients, of their
means over splits.
Fewer than 10 clients are no sample; they are compared over splits, by Student's t with
the correction of Nadeau and Bengio for splits that overlap. Below 5 % it is clearly
better, below 25 %, odds of three to one, it is likely better, and said to be no more.
Otherwise, or where the gain is negligible, clients train alone, which shares nothing.

*Nothing.* Where the better of the two on validation rows is not clearly better than the
best constant prediction on test rows, by the same test at 2.5 %, the table does not
tell what to deploy.

*Who gains.* For every client with enough test rows, the same t test over splits,
two-sided, at 5 % after Holm's correction for all clients.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedblend.runs.auto.candidates import ALONE, BY_NAME, OWN_TREES, TEST
from fedblend.stats.intervals import LEVEL, holm

AS_GOOD, NEGLIGIBLE, MUCH = 0.0025, 0.02, 0.1
"""Parts of what the best method gains over a constant prediction."""
CHANCE = 0.2
"""The p-value from which a method that is worse may be as good."""
LIKELY = 0.25
"""The p-value below which the candidate is likely better."""
FEW_CLIENTS = 10
"""Below it, clients are no sample of anything, and splits are compared."""
JUDGED = 10
"""Test rows of a client from which it is judged by itself."""
HELD = TEST / (1 - TEST)
"""Rows held out over rows trained on: by so much the splits depend on each other."""
POWER = 0.8
DEPLOYED = ("together", "likely")
"""Answers after which the candidate is deployed."""


class MethodScores(NamedTuple):
    """The criterion of a method, or of a constant, [splits, clients]; less is better.

    NaN of a client without rows. A method that takes long has the first splits only:
    two methods are compared on the splits that both have.
    """

    validation: np.ndarray
    test: np.ndarray


class MethodChoice(NamedTuple):
    """What validation rows choose, and what test rows make of it."""

    method: str
    """To deploy: ``candidate``, or training alone."""
    alone: str
    """How clients train best alone: the linear model, or boosted trees."""
    candidate: str
    """The federated method that training alone is compared with."""
    best: str
    """The best federated method on validation rows."""
    alike: list[str]
    """Federated methods that are as good as the best, the simplest first."""


class Gainers(NamedTuple):
    """Who gains by a method over training alone; names of clients."""

    gain: list[str]
    harmed: list[str]
    undecided: int
    """Clients whose rows do not tell."""
    small: int
    """Clients too small to be judged by themselves."""
    better: int
    """Clients whose mean over splits is better, however sure that is."""
    measured: int
    """Clients that have test rows."""


class Findings(NamedTuple):
    """All that a verdict says."""

    choice: MethodChoice
    informative: bool
    """Whether ``better`` is clearly better than a constant prediction."""
    better: str
    """Training alone or the candidate, by validation rows."""
    answer: str
    """Of the question that decides: "together", "likely", "alone", "negligible" or
    "open"."""
    clients: int
    splits: int
    who: Gainers
    """Who gains by the candidate."""
    shared_harms: list[str]
    """Clients that FedAvg's one model harms."""
    mean_gain: tuple[float, float, float]
    """Of the candidate over training alone, and its 95 % interval."""
    p: float
    """That the candidate is better, or that it is worse: the smaller one; one-sided."""
    detectable: float
    """The mean gain that this table would show with a power of 80 %."""
    constant: float
    """The criterion of the best constant prediction on test rows."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self._asdict(),
            "choice": self.choice._asdict(),
            "who": self.who._asdict(),
        }


def mean(values: np.ndarray) -> float:
    """The mean over splits and clients that are measured; infinite if not finite."""
    known = values[:, ~np.isnan(values).all(axis=0)]
    found = float(np.mean(known)) if known.size else np.inf
    return found if np.isfinite(found) else np.inf


def difference(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """What is above less what is below, on the splits that both have."""
    splits = min(len(above), len(below))
    return above[:splits] - below[:splits]


def comparable_means(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means as on all splits: of fewer splits, the difference to the best counts."""
    most = max(len(of) for of in scores.values())
    found = {name: mean(of) for name, of in scores.items() if len(of) == most}
    best = min(found, key=lambda name: found[name])
    for name in scores.keys() - found.keys():
        gap = mean(difference(scores[name], scores[best]))
        found[name] = found[best] + gap
    return found


def find_untrained(
    scores: Mapping[str, MethodScores], constants: Sequence[MethodScores]
) -> dict[str, str]:
    """The methods that are not trained, and why."""
    worst = max(mean(one.validation) for one in constants)
    found = {}
    for name, of in scores.items():
        if not np.isfinite([mean(of.validation), mean(of.test)]).all():
            found[name] = "its models are not finite"
        elif name != ALONE and mean(of.validation) > (1 + NEGLIGIBLE) * worst:
            found[name] = "it is worse than a constant prediction"
    return found


def decide(
    scores: Mapping[str, MethodScores],
    constants: Sequence[MethodScores],
    names: Sequence[str],
    judged: np.ndarray,
) -> Findings:
    """Apply the rule.

    Args:
        scores: of every method that is trained; training alone is one of them, and
            there is another one.
        constants: those of constant predictions.
        names: of the clients.
        judged: which clients have enough test rows to be judged by themselves.
    """
    constant = min(constants, key=lambda one: mean(one.validation))
    federated = {
        name: of
        for name, of in scores.items()
        if name != ALONE and BY_NAME[name].deployable
    }
    validated = {name: of.validation for name, of in federated.items()}
    best, alike = choose(validated, mean(constant.validation))
    candidate = alike[0]

    def validation_means(*names: str) -> dict[str, float]:
        return comparable_means({name: scores[name].validation for name in names})

    alone = ALONE
    if OWN_TREES in scores:
        means = validation_means(ALONE, OWN_TREES)
        little = NEGLIGIBLE * (mean(constant.validation) - means[OWN_TREES])
        if means[ALONE] - means[OWN_TREES] > max(little, 0.0):
            alone = OWN_TREES
    gaps = difference(scores[alone].test, scores[candidate].test)
    up, down = clearly_above(gaps), clearly_above(-gaps)
    answer = "alone" if down < LEVEL else "open"
    little = NEGLIGIBLE * (mean(constant.test) - mean(scores[candidate].test))
    if up < LIKELY and mean(gaps) > little:
        answer = "together" if up < LEVEL else "likely"
    elif up < LEVEL:
        answer = "negligible"
    method = candidate if answer in DEPLOYED else ALONE
    means = validation_means(alone, candidate)
    better = min(means, key=lambda name: means[name])
    harmed: list[str] = []
    if "fedavg" in federated:
        gained = difference(scores[alone].test, federated["fedavg"].test)
        harmed = who_gains(gained, names, judged).harmed
    return Findings(
        choice=MethodChoice(method, alone, candidate, best, alike),
        informative=clearly_above(difference(constant.test, scores[better].test))
        < LEVEL / 2,
        better=better,
        answer=answer,
        clients=int((~np.isnan(gaps).all(axis=0)).sum()),
        splits=len(gaps),
        who=who_gains(gaps, names, judged),
        shared_harms=harmed,
        mean_gain=interval(gaps),
        p=min(up, down),
        detectable=detectable(gaps),
        constant=mean(constant.test),
    )


def choose(
    validated: Mapping[str, np.ndarray], constant: float
) -> tuple[str, list[str]]:
    """The best method, and those that are as good, the simplest first.

    Args:
        validated: of each method, [splits, clients].
        constant: the value of a constant prediction.
    """
    means = comparable_means(validated)
    best = min(means, key=lambda name: means[name])
    unit = max(constant - means[best], 0.0)
    most = min(MUCH * unit, NEGLIGIBLE * abs(means[best]))
    extended = {name for name, _ in BY_NAME[best].takes.values()}

    def is_as_good(name: str) -> bool:
        gap = means[name] - means[best]
        if gap <= AS_GOOD * unit or gap > most:
            return gap <= AS_GOOD * unit
        chance = clearly_above(difference(validated[name], validated[best]))
        return chance >= (LEVEL if name in extended else CHANCE)

    return best, [name for name in BY_NAME if name in means and is_as_good(name)]


def _finite_columns(gaps: np.ndarray) -> np.ndarray:
    return gaps[:, np.isfinite(gaps).all(axis=0)]


def clearly_above(gaps: np.ndarray) -> float:
    """The one-sided p-value that differences, [splits, clients], are above zero.

    It is 1 where their mean points the other way.
    """
    gaps = _finite_columns(gaps)
    clients = gaps.shape[1]
    if not clients or not gaps.mean() > 0:
        return 1.0
    if clients >= FEW_CLIENTS:
        found: Any = stats.wilcoxon(
            gaps.mean(axis=0), zero_method="zsplit", alternative="greater"
        )
        return float(found.pvalue)
    error, freedom = _spread(gaps)
    return float(stats.t.sf(gaps.mean() / max(error, 1e-300), freedom))


def _error(by_split: np.ndarray) -> Any:
    """The standard error of a mean over splits that overlap; first axis."""
    splits = len(by_split)
    if splits < 2:
        return np.full(by_split.shape[1:], np.inf)
    return by_split.std(axis=0, ddof=1) * np.sqrt(1 / splits + HELD)


def _spread(gaps: np.ndarray) -> tuple[float, int]:
    """The standard error of the mean difference, and its degrees of freedom."""
    splits, clients = gaps.shape
    if clients >= FEW_CLIENTS:
        error = gaps.mean(axis=0).std(ddof=1) / np.sqrt(clients)
        return float(error), clients - 1
    return float(_error(gaps.mean(axis=1))), max(splits - 1, 1)


def interval(gaps: np.ndarray) -> tuple[float, float, float]:
    """The mean of differences, [splits, clients], and its 95 % interval."""
    gaps = _finite_columns(gaps)
    error, freedom = _spread(gaps)
    middle = float(gaps.mean())
    half = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    return middle, middle - half, middle + half


def detectable(gaps: np.ndarray) -> float:
    """The mean difference that would be clear with a probability of ``POWER``."""
    error, freedom = _spread(_finite_columns(gaps))
    return error * float(stats.t.ppf(1 - LEVEL, freedom) + stats.norm.ppf(POWER))


def who_gains(gaps: np.ndarray, names: Sequence[str], judged: np.ndarray) -> Gainers:
    """Who gains, and who is harmed, at 5 % for all clients together.

    Args:
        gaps: what clients gain, [splits, clients].
        names: of the clients.
        judged: which of them have enough rows.
    """
    splits = len(gaps)
    known = np.isfinite(gaps).all(axis=0)
    value = np.where(known, gaps.mean(axis=0), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.abs(value) / _error(gaps)
    chance = 2 * stats.t.sf(score, max(splits - 1, 1))
    clear = holm(np.where(known & judged, chance, np.nan).tolist()) < LEVEL
    gain, harmed = (
        [names[int(place)] for place in np.flatnonzero(clear & (side > 0))]
        for side in (value, -value)
    )
    decided, told = len(gain) + len(harmed), int((known & judged).sum())
    return Gainers(
        gain,
        harmed,
        undecided=told - decided,
        small=len(names) - told,
        better=int((value > 0).sum()),
        measured=int(known.sum()),
    )
