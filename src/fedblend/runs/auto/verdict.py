# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict of ``fedblend auto``: what to deploy, who gains, how sure that is.

What to deploy, who gains, and how sure that is: a rule that is fixed beforehand.

*Gate.* A method whose models are not finite, or that is worse than both constant
predictions on validation rows by more than chance may do, is not trained, and takes no
part in what follows. Without training alone there is nothing to compare with, and no
verdict.

*Candidate.* Validation rows choose one federated method: the simplest, in the order of
``candidates``, of those that are as good as the best one. These are worse by less than
2 % of what the best one gains over a constant prediction; or by less than 5 %, and not
clearly.

*Alone* is the linear model of each client, or boosted trees on its own rows where
validation rows choose these, by the same rule.

*The question that decides.* Is the candidate better than training alone, on test rows?
One test, once, one-sided, at 5 %: Wilcoxon's signed-rank test over clients, of their
means over splits.
Fewer than 10 clients are no sample; they are compared over splits, by Student's t with
the correction of Nadeau and Bengio for splits that overlap. Where the answer is not a
clear yes, or the gain is negligible, clients train alone, which shares nothing.

*Nothing.* Where the better of the two on validation rows is not clearly better than the
best constant prediction on test rows, by the same test at 2.5 %, the table does not
tell what to deploy.

*Who gains.* For every client with enough test rows, the same t test over splits,
two-sided, at 5 % after Holm's correction for all clients.

``scores`` are the criterion of every trained method on test rows, mean over clients and
splits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedblend.runs.auto.candidates import ALONE, BY_NAME, OWN_TREES, POOLED_TREES, TEST
from fedblend.stats.intervals import LEVEL, holm

NEGLIGIBLE, SMALL = 0.02, 0.05
"""Parts of what the best method gains over a constant prediction."""
FEW_CLIENTS = 10
"""Below it, clients are no sample of anything, and splits are compared."""
JUDGED = 10
"""Test rows of a client from which it is judged by itself."""
HELD = TEST / (1 - TEST)
"""Rows held out over rows trained on: by so much the splits depend on each other."""
POWER = 0.8


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
    """Of the question that decides: "together", "alone", "negligible" or "open"."""
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
        elif mean(of.validation) > (1 + NEGLIGIBLE) * worst:
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
    by_itself = {
        name: scores[name].validation for name in (ALONE, OWN_TREES) if name in scores
    }
    alone = choose(by_itself, mean(constant.validation))[1][0]
    gaps = difference(scores[alone].test, scores[candidate].test)
    up, down = clearly_above(gaps), clearly_above(-gaps)
    answer = "alone" if down < LEVEL else "open"
    if up < LEVEL:
        little = NEGLIGIBLE * (mean(constant.test) - mean(scores[candidate].test))
        answer = "together" if mean(gaps) > little else "negligible"
    method = candidate if answer == "together" else ALONE
    means = comparable_means(
        {name: scores[name].validation for name in (alone, candidate)}
    )
    better = min(means, key=lambda name: means[name])
    shared = None
    if "fedavg" in federated:
        gained = difference(scores[alone].test, federated["fedavg"].test)
        shared = who_gains(gained, names, judged)
    return Findings(
        choice=MethodChoice(method, alone, candidate, best, alike),
        informative=clearly_above(difference(constant.test, scores[better].test))
        < LEVEL / 2,
        better=better,
        answer=answer,
        clients=int((~np.isnan(gaps).all(axis=0)).sum()),
        splits=len(gaps),
        who=who_gains(gaps, names, judged),
        shared_harms=shared.harmed if shared else [],
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

    def is_as_good(name: str) -> bool:
        gap = means[name] - means[best]
        if gap <= NEGLIGIBLE * unit:
            return True
        clear = clearly_above(difference(validated[name], validated[best])) < LEVEL
        return gap <= SMALL * unit and not clear

    return best, [name for name in BY_NAME if name in means and is_as_good(name)]


def _finite_columns(gaps: np.ndarray) -> np.ndarray:
    return gaps[:, np.isfinite(gaps).all(axis=0)]


def clearly_above(gaps: np.ndarray) -> float:
    """The one-sided p-value that differences, [splits, clients], are above zero.

    It is 1 where their mean points the other way.
    """
    gaps = _finite_columns(gaps)
    splits, clients = gaps.shape
    if not clients or not gaps.mean() > 0:
        return 1.0
    if clients >= FEW_CLIENTS:
        found: Any = stats.wilcoxon(
            gaps.mean(axis=0), zero_method="zsplit", alternative="greater"
        )
        return float(found.pvalue)
    score = gaps.mean() / max(_error(gaps.mean(axis=1)), 1e-300)
    return float(stats.t.sf(score, max(splits - 1, 1)))


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


_TREES = {ALONE: "", OWN_TREES: ", with boosted trees"}
NAMED = 5
"""Names that a list shows."""
WORSE = {
    "alone": "is clearly worse",
    "open": "is not clearly better",
    "negligible": "is better by a negligible amount only",
}
"""Why clients train alone, by the answer of the question that decides."""
TINY = 0.0001
"""Below it a p-value has no meaning of its own."""


def no_verdict(reasons: Mapping[str, str]) -> list[str]:
    """What is said where training alone, or every other method, is not trained."""
    return [
        f"No verdict: {_failures(reasons)}, so there is nothing to compare. No run, "
        "configuration or page is written; results.csv has the scores."
    ]


def _failures(reasons: Mapping[str, str]) -> str:
    return join_names(
        [f"{_title(name)} is not trained ({why})" for name, why in reasons.items()]
    )


def sentences(
    of: Findings,
    scores: Mapping[str, float],
    criterion: str,
    left_out: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
) -> list[str]:
    """What to deploy; who gains and who does not; how sure that is.

    Args:
        of: what was found.
        scores: see the module's text.
        criterion: its name.
        left_out: titles of the methods that there was no time for, or too little.
        failed: methods that are not trained, and why.
    """
    shown = {name: f"{score:.4g}" for name, score in scores.items()}
    method, other, alone = of.choice.method, of.choice.candidate, of.choice.alone
    # The mean and the ranks answer two questions, and may answer them differently.
    whom = "" if of.mean_gain[1] > 0 else " for most clients"
    if not of.informative:
        what = (
            f"Deploy nothing yet: {_title(of.better)}, the best method on validation "
            "rows, does not predict the target clearly better than a constant does "
            f"(test {criterion} {shown[of.better]}; constant {of.constant:.4g}), so "
            "this table cannot tell what to deploy"
        )
    elif method == ALONE:
        why = WORSE[of.answer]
        what = (
            f"Train alone{_TREES[alone]}: the best federated method, {_title(other)}, "
            f"{why} (test {criterion} {shown[alone]} alone, {shown[other]} with it)"
        )
    else:
        what = (
            f"Deploy {_title(method)}: it is clearly better than training alone{whom} "
            f"(test {criterion} {shown[method]}; alone{_TREES[alone]} {shown[alone]})"
            f"{_others(of, shown)}"
        )
    what += _limit(of, scores, shown)
    if failed:
        what += f". {_failures(failed)}"
    if left_out:
        what += f". There was no time for {join_names(left_out)}, which may be better"
    return [f"{what}.", _who(of), _how_sure(of, criterion)]


def _limit(of: Findings, scores: Mapping[str, float], shown: Mapping[str, str]) -> str:
    """What linear models miss, where trees or networks are much better."""
    linear = {
        name: of for name, of in scores.items() if BY_NAME[name].model == "linear"
    }
    best = min(linear, key=lambda name: linear[name])
    other = min(scores, key=lambda name: scores[name])
    unit = of.constant - scores[other]
    if not of.informative or scores[best] - scores[other] <= SMALL * unit:
        return ""
    text = f". Linear models are the limit: the best one, {_title(best)}, scores "
    text += f"{shown[best]}, {_title(other)} {shown[other]}"
    if other == POOLED_TREES:
        text += ", which a federation cannot have"
    return text


def _others(of: Findings, shown: Mapping[str, str]) -> str:
    alike = [f"{_title(name)} {shown[name]}" for name in of.choice.alike[1:]]
    if not alike:
        return ""
    return f", and the simplest of the methods that are as good ({join_names(alike)})"


def _who(of: Findings) -> str:
    who, title = of.who, _title(of.choice.candidate)
    text = f"{title} scores better than training alone for {who.better} of "
    text += f"{who.measured} clients; {_judgement(who)}"
    others = [name for name in of.shared_harms if name not in who.harmed]
    if others and of.choice.candidate != "fedavg":
        text += f"; FedAvg's one model for all would harm {_join_clients(others)}"
    return f"{text[0].upper()}{text[1:]}."


def _judgement(who: Gainers) -> str:
    """Who clearly gains, and who is better off alone."""
    told = len(who.gain) + len(who.harmed) + who.undecided
    if not told:
        return "none has enough test rows to be judged by itself"
    text = f"of {told} judged together, at a risk of 5 % of naming any by chance, "
    text += f"{len(who.gain)} clearly "
    text += "gains" if len(who.gain) == 1 else "gain"
    if 0 < len(who.gain) <= NAMED:
        text += f" ({_join_clients(who.gain)})"
    if who.harmed:
        verb = "is" if len(who.harmed) == 1 else "are"
        text += f", {_join_clients(who.harmed)} {verb} better off alone"
    else:
        text += ", none is clearly better off alone"
    if who.undecided:
        text += f", and {_have(who.undecided)} too few rows to be sure"
    return text


def _how_sure(of: Findings, criterion: str) -> str:
    mean, low, high = of.mean_gain
    chance = f"p = {of.p:.2g}" if of.p >= TINY else f"p < {TINY}"
    test = "signed-rank test over clients"
    if of.clients < FEW_CLIENTS:
        test = "t test over splits"
    change = "improves" if mean >= 0 else "worsens"
    if mean < 0:
        mean, low, high = -mean, -high, -low
    text = (
        f"How sure: over {of.clients} clients and {of.splits} splits "
        f"{_title(of.choice.candidate)} {change} the test {criterion} of training "
        f"alone by {mean:.3g} on average (95 % interval {low:.3g} to {high:.3g}; "
        f"{test}, {chance})"
    )
    if of.answer == "open":
        text += (
            f"; a table like this shows a mean gain of {of.detectable:.3g} four times "
            "out of five"
        )
    if of.who.small:
        text += f"; {_have(of.who.small, 'client')} too few test rows to be judged"
    return f"{text}."


def _have(count: int, noun: str = "") -> str:
    """How many have something.

    >>> _have(1, "client"), _have(3)
    ('1 client has', '3 have')
    """
    plural = "s" if noun and count != 1 else ""
    verb = "has" if count == 1 else "have"
    return " ".join(filter(None, [str(count), f"{noun}{plural}", verb]))


def _title(name: str) -> str:
    return BY_NAME[name].title


def _join_clients(names: Sequence[str]) -> str:
    """Names of clients; a name that is a number is no number of clients.

    >>> _join_clients(["16"]), _join_clients(["Priory", "Meadow"])
    ('client 16', 'Priory and Meadow')
    """
    if not any(name[:1].isdigit() for name in names):
        return join_names(names)
    return f"client{'s' if names[1:] else ''} {join_names(names)}"


def join_names(names: Sequence[str]) -> str:
    """Names in a sentence, no more than a few.

    >>> join_names(["Meadow", "Priory", "Harbour"])
    'Meadow, Priory and Harbour'
    """
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
