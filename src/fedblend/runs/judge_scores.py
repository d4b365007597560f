# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A referee for scores of any library: which methods are better than a baseline.

Scores of a method and of the baseline are paired by seed and client. The mean gain has
an interval over clients and seeds and a p-value (``stats.intervals``). Both are
corrected for all candidates that were searched, also for those whose scores are not
shown: Holm's p-values, Bonferroni's intervals. A client is judged by itself where there
are two seeds or more: Student's t over seeds, Holm's correction for all clients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.errors import RunError, hint
from fedblend.metrics import METRICS
from fedblend.runs.judge_files import Columns, Scores, read_scores
from fedblend.stats.intervals import (
    LEVEL,
    error_sources,
    half_width,
    holm,
    p_of_mean,
)

BASELINE = "baseline"
MOST_NAMED = 5


class Judged(NamedTuple):
    """A candidate compared with the baseline; a gain above zero is better."""

    method: str
    score: float
    """Mean over the clients and seeds that are compared."""
    baseline: float
    """The baseline's mean over the same."""
    gain: float
    low: float
    high: float
    """The 95 % interval of the gain, this candidate alone."""
    searched_low: float
    searched_high: float
    """The interval that holds for all candidates that were searched together."""
    p: float
    corrected: float
    """The p-value after Holm's correction for all candidates that were searched."""
    luck: float
    """What the best of so many candidates would gain on average if none were better."""
    seeds: int
    clients: int
    better: int
    worse: int
    """Clients by the sign of their gain."""
    helped: list[str]
    harmed: list[str]
    """Clients for which this is clear, at 5 % for all clients together."""
    broken: list[str]
    """Clients without a finite score here, though the baseline has one."""

    @property
    def clear(self) -> bool:
        """Whether the gain is not zero, after the correction."""
        return self.corrected < LEVEL


class Judgement(NamedTuple):
    """All candidates, the best first, and what is said of them."""

    baseline: str
    higher_is_better: bool
    searched: int
    candidates: list[Judged]

    @property
    def verdict(self) -> list[str]:
        """The judgement in sentences."""
        return _sentences(self)

    def plain(self) -> dict[str, Any]:
        """Plain values; what is not known is NaN."""
        rows = [one._asdict() | {"clear": one.clear} for one in self.candidates]
        return self._asdict() | {"candidates": rows, "verdict": self.verdict}


def judge(
    scores: Any,
    *,
    baseline: str | None = None,
    searched: int | None = None,
    higher_is_better: bool | None = None,
    method: str | None = None,
    client: str | None = None,
    seed: str | None = None,
    score: str | None = None,
    overlap: float = 0.0,
) -> Judgement:
    """Compare the scores of methods with a baseline.

    Args:
        scores: a file or several (CSV, TSV, JSON), a frame, or a mapping from names to
            columns: method, client, seed and score.
        baseline: name of the method to compare with; "baseline" if None.
        searched: how many candidates were tried, shown or not; those shown if None.
        higher_is_better: whether more is better; by the name of the score if None.
        method: column of the method; "method" if None, and so on for the next ones.
        client: column of the client; without it there is one client.
        seed: column of the seed; without it, repeated rows are repeated runs.
        score: column of the score, or the metric of a history.
        overlap: rows held out over rows trained on, where seeds are splits of the same
            rows, such as 0.25; 0 where each seed has rows of its own or all the same.

    >>> table = {
    ...     "method": ["baseline"] * 3 + ["ours"] * 3,
    ...     "client": ["a", "b", "c"] * 2,
    ...     "score": [0.70, 0.60, 0.80, 0.74, 0.65, 0.83],
    ... }
    >>> judge(table, higher_is_better=True).candidates[0].corrected < 0.05
    True
    """
    found = read_scores(scores, Columns(method, client, seed, score))
    better = _direction(higher_is_better, score or "score")
    name = _baseline(found, baseline)
    others = [other for other in found.values if other != name]
    if not others:
        raise RunError(f"{found.where}: has no method but {name!r}: nothing to compare")
    count = max(len(others), found.tried - 1) if searched is None else searched
    if count < len(others):
        raise RunError(
            f"--searched: {count} is less than the {len(others)} candidates that the "
            "scores have"
        )
    made = [
        _judge_one(found, other, name, 1 if better else -1, count, overlap)
        for other in others
    ]
    corrected = holm([one.p for one in made], count)
    made = [
        one._replace(corrected=float(p)) for one, p in zip(made, corrected, strict=True)
    ]
    made.sort(key=lambda one: -one.gain)
    return Judgement(name, better, count, made)


def _direction(asked: bool | None, score: str) -> bool:
    if asked is not None:
        return asked
    kind = score.partition("@")[0]
    if kind in METRICS:
        return METRICS[kind].facts.higher_is_better
    raise RunError(
        f"{score}: say whether more of it is better, with --higher-is-better or "
        "--lower-is-better"
    )


def _baseline(found: Scores, asked: str | None) -> str:
    name = asked or found.baseline or BASELINE
    if name not in found.values:
        raise RunError(f"--baseline: {name!r}: {hint(name, found.values)}")
    return name


def _judge_one(
    found: Scores, method: str, baseline: str, sign: int, count: int, overlap: float
) -> Judged:
    own, base = found.values[method], found.values[baseline]
    seeds = [seed for seed in _places(base, 0) if seed in _places(own, 0)]
    clients = [client for client in _places(base, 1) if client in _places(own, 1)]
    both = np.array(
        [
            [[of.get((seed, client), np.nan) for client in clients] for seed in seeds]
            for of in (own, base)
        ]
    ).reshape(2, len(seeds), len(clients))
    whole: np.ndarray = np.isfinite(both).all(axis=1)  # pyright: ignore
    names = np.array(clients, object)
    broken = [*names[~whole[0] & whole[1]]]
    known = whole.all(axis=0)
    if not known.any():
        raise RunError(
            f"{found.where}: {method!r} and {baseline!r} have no client with finite "
            "scores in the same seeds"
        )
    gaps = sign * (both[0] - both[1])[:, known]
    gain, sources = float(gaps.mean()), error_sources(gaps, overlap)
    one, many = half_width(sources), half_width(sources, LEVEL / count)
    error = float(np.sqrt(sum(e**2 for _, e in sources)))
    helped, harmed = _clear_clients(gaps, names[known], overlap)
    return Judged(
        method=method,
        score=float(both[0][:, known].mean()),
        baseline=float(both[1][:, known].mean()),
        gain=gain,
        low=gain - one,
        high=gain + one,
        searched_low=gain - many,
        searched_high=gain + many,
        p=_p(gaps, overlap),
        corrected=float("nan"),
        luck=_luck(error, count) if sources else float("nan"),
        seeds=len(seeds),
        clients=gaps.shape[1],
        better=int((gaps.mean(axis=0) > 0).sum()),
        worse=int((gaps.mean(axis=0) < 0).sum()),
        helped=helped,
        harmed=harmed,
        broken=broken,
    )


def _places(of: dict[tuple[str, str], float], part: int) -> dict[str, None]:
    return dict.fromkeys(place[part] for place in of)


def _p(gaps: np.ndarray, overlap: float) -> float:
    if not gaps.any():
        return 1.0
    return p_of_mean(abs(float(gaps.mean())), error_sources(gaps, overlap))


def _clear_clients(
    gaps: np.ndarray, names: np.ndarray, overlap: float
) -> tuple[list[str], list[str]]:
    """Clients that clearly gain, and those that clearly lose."""
    if len(gaps) < 2:
        return [], []
    each = [_p(column[:, None], overlap) for column in gaps.T]
    clear, value = holm(each) < LEVEL, gaps.mean(axis=0)
    return [*names[clear & (value > 0)]], [*names[clear & (value < 0)]]


def _luck(error: float, count: int) -> float:
    """The largest of so many normal errors on average, by Blom's approximation.

    >>> round(_luck(1.0, 10), 2)  # exactly 1.54
    1.55
    """
    from scipy.special import ndtri

    return error * max(float(ndtri((count - 0.375) / (count + 0.25))), 0.0)


def _sentences(of: Judgement) -> list[str]:
    best = of.candidates[0]
    lines = [_how_sure(best, of)]
    clear = [one.method for one in of.candidates[1:] if one.clear and one.gain > 0]
    if clear:
        lines.append(f"Also clearly better than {of.baseline}: {_list_names(clear)}.")
    if best.seeds < 2:
        lines.append("With one seed no client can be judged by itself.")
    for one in of.candidates:
        if one.harmed:
            lines.append(f"{one.method} clearly harms {_list_names(one.harmed)}.")
        if one.broken:
            lines.append(
                f"{one.method} has no finite score for {_list_names(one.broken)}, "
                f"where {of.baseline} has one: left out, which favors {one.method}."
            )
    return lines


def _how_sure(best: Judged, of: Judgement) -> str:
    text = f"{best.method} is the best of {len(of.candidates)} candidates: its gain "
    text += f"over {of.baseline} is {best.gain:.3g}"
    if np.isnan(best.p):
        return (
            f"{text}, and whether that is chance cannot be told: it needs two clients "
            "or two seeds that differ."
        )
    text += f" (95 % interval {best.low:.3g} to {best.high:.3g}, p = {best.p:.2g})"
    if best.gain <= 0:
        return f"{text}, so none is better."
    answer = "is clear of chance" if best.clear else "may be chance"
    if of.searched == 1:
        return f"{text}; this {answer}."
    return (
        f"{text}. With {of.searched} candidates searched this {answer}: p = "
        f"{best.corrected:.2g} corrected, interval {best.searched_low:.3g} to "
        f"{best.searched_high:.3g}. If none were better, the best of {of.searched} "
        f"would still seem to gain about {best.luck:.3g}."
    )


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    shown = ", ".join(name or "the only client" for name in names[:MOST_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown
