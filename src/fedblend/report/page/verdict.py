# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run in plain sentences: does taking part pay, for whom, how sure."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.gains import GainSummary
from fedblend.report import measures
from fedblend.report.page.clients import STATUS, Clients
from fedblend.report.page.curves import higher_is_better

SHARES = ("accuracy", "recall", "balanced_accuracy")
"""Metrics that are a share of rows, said in percent."""
METRICS = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "average_precision": "average precision",
    "balanced_accuracy": "balanced accuracy",
    "mse": "mean squared error",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
    "brier": "Brier score",
    "log_loss": "log loss",
}
MOST_NAMED = 3
"""Harmed clients that the verdict names."""


class Headline(NamedTuple):
    """The numbers of a verdict: one metric of one split, means over clients and seeds.

    ``gain`` compares the personal model with ``other``; None without a comparison.
    """

    split: str
    metric: str
    higher: bool
    models: dict[str, float]
    other: str | None
    gain: GainSummary | None


def headline(summary: dict[str, Any]) -> Headline | None:
    """The headline of a finished run; None where nothing was measured."""
    runs = summary["runs"]
    splits = measures.shown_splits(runs)
    if not splits or not any(runs[-1]["measures"][splits[0]].values()):
        return None
    split = splits[0]
    metric = measures.shown_metrics(runs, split)[0]
    models = {
        model: _mean(runs, "measures", split, model, metric, "mean")
        for model in measures.MODELS
        if model in runs[0]["measures"][split]
    }
    spread = next(iter(runs[0]["measures"][split].values()))[metric]
    harmed = summary.get("harmed") or (runs[0].get("harmed") if len(runs) == 1 else {})
    gains = (harmed or {}).get(split, {}).get(metric, {})
    for name, plain in gains.items():
        known = measures.summary_from(plain)
        if known is not None:
            other = name.removeprefix("than_")
            higher = higher_is_better(spread, metric)
            return Headline(split, metric, higher, models, other, known)
    return Headline(
        split, metric, higher_is_better(spread, metric), models, None, None
    )


def _mean(runs: Sequence[dict], *path: str) -> float:
    return float(np.mean([measures.value_at(run, *path) for run in runs]))


def name_of(metric: str) -> str:
    """A metric in words."""
    kind, _, place = metric.partition("@")
    name = METRICS.get(kind, kind.replace("_", " "))
    return f"{name} at {place}" if place else name


def said(value: float, metric: str) -> str:
    """A value with its unit.

    >>> said(0.9639, "accuracy"), said(0.24601, "loss")
    ('96.4 %', '0.246')
    """
    if metric.partition("@")[0] in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.3g}"


def points(value: float, metric: str) -> str:
    """A difference with its unit; never minus zero.

    >>> points(0.0222, "accuracy"), points(-0.1234, "loss")
    ('2.2 points', '-0.123')
    """
    if metric.partition("@")[0] in SHARES:
        return f"{round(100 * value, 1) + 0.0:.1f} points"
    return f"{value + 0.0:.3g}"


def interval(low: float, high: float, metric: str) -> str:
    """The ends of an interval; the unit once."""
    first = points(low, metric).removesuffix(" points")
    return f"{first} to {points(high, metric)}"


def sentences(
    summary: dict[str, Any] | None, clients: Clients | None
) -> tuple[str, list[str]]:
    """The verdict of one run: a word for its color, and the sentences.

    Returns:
        "good", "bad", "mixed" or "open", and one to four sentences.
    """
    if summary is None:
        return "open", ["This run is not finished: there is no verdict yet."]
    found = headline(summary)
    if found is None:
        return "open", ["Nothing was measured in this run."]
    if found.gain is None or not found.gain.clients:
        return "open", _without_comparison(found)
    tone, first = _does_it_pay(found, found.gain)
    seeds = len(summary["runs"])
    return tone, [
        first,
        _who_gains(found.gain),
        *_who_is_harmed(found, found.gain, clients),
        _how_sure(found.gain, seeds),
    ]


def _without_comparison(found: Headline) -> list[str]:
    model = "personal" if "personal" in found.models else "shared"
    value = found.models.get(model, math.nan)
    return [
        f"A client's model reaches {name_of(found.metric)} {said(value, found.metric)} "
        f"on {found.split} rows, on average over clients.",
        "This run did not train clients alone, so this page cannot say whether "
        "taking part pays.",
    ]


def _does_it_pay(found: Headline, gain: GainSummary) -> tuple[str, str]:
    other = measures.OTHERS[found.other or "local"]
    value = said(found.models["personal"], found.metric)
    rival = said(found.models[found.other or "local"], found.metric)
    numbers = (
        f"{name_of(found.metric)} is {value} on {found.split} rows, against {rival} "
        f"by {other}"
    )
    ends = interval(gain.mean_gain_low, gain.mean_gain_high, found.metric)
    pays = "Taking part pays" if found.other == "local" else "A model of its own pays"
    if gain.mean_gain_low > 0:
        more = points(gain.mean_gain, found.metric)
        text = f"{pays} on average: {numbers}. That is a gain of {more} ({ends})."
        return ("good" if not gain.count else "mixed"), text
    if gain.mean_gain_high < 0:
        less = points(-gain.mean_gain, found.metric)
        no = pays.replace("pays", "does not pay")
        ends = interval(-gain.mean_gain_high, -gain.mean_gain_low, found.metric)
        return "bad", f"{no} on average: {numbers}. That is a loss of {less} ({ends})."
    return "open", (
        f"Whether taking part pays on average is not clear: {numbers}. The gain is "
        f"{points(gain.mean_gain, found.metric)}, but may be anywhere from {ends}."
    )


def _who_gains(gain: GainSummary) -> str:
    """Whose interval lies on which side.

    >>> from fedblend.gains import GainSummary
    >>> two = GainSummary(2, 0.5, 0.1, 0.2, 0.1, 1, 4, 0, 0, 3, 1, 0.0, -0.1, 0.1)
    >>> _who_gains(two)
    'Of 4 clients, 1 is clearly better off and 2 are clearly worse off; for 1 it is not clear.'
    """
    either = gain.clients - gain.helped - gain.count
    if either == gain.clients:
        return (
            f"For none of the {gain.clients} clients is it clear whether it is better "
            "or worse off: each has too few held-out rows."
        )
    text = f"Of {gain.clients} clients, {_are(gain.helped)} clearly better off and "
    text += f"{_are(gain.count)} clearly worse off"
    return f"{text}; for {either} it is not clear." if either else f"{text}."


def _are(count: int) -> str:
    return {0: "none is", 1: "1 is"}.get(count, f"{count} are")


def _who_is_harmed(
    found: Headline, gain: GainSummary, clients: Clients | None
) -> list[str]:
    lines = []
    if gain.count:
        names = _harmed_names(clients)
        who = f" ({names})" if names else ""
        lines.append(
            f"The clients that are worse off{who} lose "
            f"{points(gain.mean_loss, found.metric)} on average, "
            f"{points(gain.worst, found.metric)} at worst: offer them the other model."
        )
    if gain.not_finite:
        lines.append(
            f"The models of {gain.not_finite} clients are broken: their numbers are "
            "not finite."
        )
    return lines


def _harmed_names(clients: Clients | None) -> str:
    if clients is None:
        return ""
    harmed = np.flatnonzero(clients.status == STATUS.index("harmed"))
    names = [clients.names[place] for place in harmed[:MOST_NAMED]]
    more = ["..."] if len(harmed) > MOST_NAMED else []
    return ", ".join(names + more)


def _how_sure(gain: GainSummary, seeds: int) -> str:
    over = "1 run" if seeds == 1 else f"{seeds} repeated runs"
    return (
        f"How sure: intervals are 95 %, over {gain.clients} clients and {over}; by "
        f"chance alone up to {gain.by_chance:.2g} of {gain.clients} clients would be "
        "called worse off."
    )


def of_several(found: dict[str, Headline]) -> list[str]:
    """The verdict on several runs: which is best, and whether it beats training alone.

    Args:
        found: headlines of runs by name, of the same split and metric.
    """
    known = {
        name: head.models["personal"]
        for name, head in found.items()
        if math.isfinite(head.models.get("personal", math.nan))
    }
    if not known:
        return ["Nothing comparable was measured in these runs."]
    some = next(iter(found.values()))
    order = sorted(known, key=lambda name: known[name], reverse=some.higher)
    best, metric = found[order[0]], some.metric
    lines = [
        f"Best on average: {order[0]}, {name_of(metric)} "
        f"{said(known[order[0]], metric)} on {some.split} rows."
    ]
    if len(order) > 1:
        gap = points(abs(known[order[0]] - known[order[1]]), metric)
        lines[0] += f" Next is {order[1]}, {gap} behind."
    if best.gain is not None and best.gain.clients:
        lines += [_does_it_pay(best, best.gain)[1], _who_gains(best.gain)]
    return lines


def of_client(clients: Clients, place: int) -> tuple[str, list[str]]:
    """The verdict for one client about itself."""
    state = STATUS[int(clients.status[place])]
    other, metric = clients.reference, clients.metric
    if other is None or metric is None or state == "unknown":
        return "open", ["There is nothing to compare your model with."]
    if state == "not finite":
        return "bad", ["Your personal model is broken: its numbers are not finite."]
    rival = measures.OTHERS[other]
    gain = float(clients.gains[other][place])
    low, high = (float(clients.gains[f"{other}_{end}"][place]) for end in ("low", "high"))
    size = points(abs(gain), metric)
    known = math.isfinite(low) and math.isfinite(high)
    ends = f" (95 % interval of the gain: {interval(low, high, metric)})" if known else ""
    word = "better" if gain >= 0 else "worse"
    first = f"Your personal model is {size} {word} than {rival}{ends}."
    if state == "gains":
        return "good", [first, "Taking part pays for you: this is clear of chance."]
    if state == "harmed":
        return "bad", [first, f"You are better off with {rival}: use that model."]
    return "open", [first, "Your test rows are too few to tell this from chance."]
