# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run in plain sentences: does taking part pay, for whom, how sure."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.registry import ALGORITHMS
from fedblend.report import measures
from fedblend.report.clients import STATUS, ClientColumns
from fedblend.report.series import higher_is_better
from fedblend.runs.paired import ALONE
from fedblend.stats.gains import GainSummary

SHARES = ("accuracy", "recall", "balanced_accuracy")
"""Metrics that are a share of rows, said in percent."""
METRICS = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "average_precision": "average precision",
    "balanced_accuracy": "balanced accuracy",
    "deviance": "Poisson deviance",
    "mse": "mean squared error",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
    "brier": "Brier score",
    "log_loss": "log loss",
}
MINUS = "\N{MINUS SIGN}"
NOT_CLEAR = "It is not clear whether taking part pays."
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
    """The headline of a finished run; None where nothing was measured.

    Args:
        summary: the content of ``summary.json``.
    """
    runs = summary["runs"]
    splits = measures.main_splits(runs)
    if not splits or not any(runs[-1]["measures"][splits[0]].values()):
        return None
    split = splits[0]
    metric = measures.list_metrics(runs, split)[0]
    models = {
        model: measures.mean_over_seeds(runs, "measures", split, model, metric, "mean")
        for model in measures.MODELS
        if model in runs[0]["measures"][split]
    }
    spread = next(iter(runs[0]["measures"][split].values()))[metric]
    found = Headline(
        split, metric, higher_is_better(spread, metric), models, None, None
    )
    gains = summary.get("harmed", {}).get(split, {}).get(metric, {})
    for name, plain in gains.items():
        if set(plain) == set(GainSummary._fields):  # not of an older fedblend
            counts: Any = {
                key: math.nan if of is None else of for key, of in plain.items()
            }
            other = name.removeprefix("than_")
            return found._replace(other=other, gain=GainSummary(**counts))
    return found


def name_of(metric: str) -> str:
    """A metric in words."""
    kind, _, place = metric.partition("@")
    name = METRICS.get(kind, kind.replace("_", " "))
    return f"{name} at {place}" if place else name


def value_text(value: float, metric: str) -> str:
    """A value with its unit.

    >>> value_text(0.9639, "accuracy"), value_text(0.24601, "loss")
    ('96.4 %', '0.246')
    """
    if not math.isfinite(value):
        return "not finite"
    if metric.partition("@")[0] in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.3g}"


def points(value: float, metric: str) -> str:
    """A difference with its unit; never minus zero.

    >>> points(0.0222, "accuracy"), points(-0.1234, "loss")
    ('2.2 points', '−0.123')
    """
    if metric.partition("@")[0] in SHARES:
        text = f"{round(100 * value, 1) + 0.0:.1f} points"
    else:
        text = f"{value + 0.0:.3g}"
    return text.replace("-", MINUS, 1) if value < 0 else text


def interval(low: float, high: float, metric: str) -> str:
    """The ends of an interval; the unit once."""
    first = points(low, metric).removesuffix(" points")
    return f"{first} to {points(high, metric)}"


def sentences(
    summary: dict[str, Any] | None, clients: ClientColumns | None = None
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
    if found.gain is not None and found.gain.not_finite and not found.gain.clients:
        return "bad", _who_is_harmed(found, found.gain, clients)
    if found.gain is None or not found.gain.clients:
        method = ALGORITHMS.get(str(summary.get("algorithm")))
        alone = method is not None and not method.sends
        return "open", _no_comparison(found, alone)
    tone, first = _does_it_pay(found, found.gain)
    seeds = len(summary["runs"])
    return tone, [
        *first,
        who_gains(found.gain),
        *_who_is_harmed(found, found.gain, clients),
        _how_sure(found.gain, seeds),
    ]


def _no_comparison(found: Headline, alone: bool) -> list[str]:
    model = "personal" if "personal" in found.models else "shared"
    value = found.models.get(model, math.nan)
    why = "Whether taking part pays is not known: this run did not train clients alone."
    if alone:
        why = "In this run every client trains alone: compare it with a federated one."
    return [
        why,
        f"A client's model reaches {name_of(found.metric)} "
        f"{value_text(value, found.metric)} on {found.split} rows, on average over "
        "clients.",
    ]


def _does_it_pay(found: Headline, gain: GainSummary) -> tuple[str, list[str]]:
    """The color, the short answer, and its numbers."""
    other = found.other or "local"
    value = value_text(found.models["personal"], found.metric)
    rival = value_text(found.models[other], found.metric)
    numbers = (
        f"On {found.split} rows {name_of(found.metric)} is {value} on average, against "
        f"{rival} by {measures.OTHERS[other]}"
    )
    what = "Taking part" if other == "local" else "A personal model"
    if gain.mean_gain_low > 0:
        tone, answer = "good", f"{what} pays on average."
        if gain.count:
            tone, answer = "mixed", f"{what} pays on average, but not for everyone."
    elif gain.mean_gain_high < 0:
        tone, answer = "bad", f"{what} does not pay."
    else:
        tone, answer = "open", f"It is not clear whether {what.lower()} pays."
    word, sign = ("gain", 1) if gain.mean_gain >= 0 else ("loss", -1)
    size = f"a {word} of {points(sign * gain.mean_gain, found.metric)}"
    low, high = sorted((sign * gain.mean_gain_low, sign * gain.mean_gain_high))
    text = interval(low, high, found.metric)
    return tone, [answer, f"{numbers}: {size} (95 % interval: {text})."]


def who_gains(gain: GainSummary) -> str:
    """Whose interval lies on which side.

    >>> from fedblend.stats.gains import GainSummary
    >>> two = GainSummary(2, 0.5, 0.1, 0.2, 1, 1, 4, 0, 0, 3, 1, 0.0, -0.1, 0.1)
    >>> who_gains(two._replace(clients=3))
    'Of 3 clients, 1 is clearly better off and 2 are clearly worse off.'
    """
    either = gain.clients - gain.helped - gain.count
    if either == gain.clients:
        return (
            f"For none of the {gain.clients:,} clients is it clear whether it is "
            "better or worse off: each has too few held-out rows."
        )
    text = f"Of {gain.clients:,} clients, {_are(gain.helped)} clearly better off and "
    text += f"{_are(gain.count)} clearly worse off"
    return f"{text}; for {either:,} it is not clear." if either else f"{text}."


def _are(count: int) -> str:
    return {0: "none is", 1: "1 is"}.get(count, f"{count:,} are")


def _who_is_harmed(
    found: Headline, gain: GainSummary, clients: ClientColumns | None
) -> list[str]:
    lines = []
    if gain.count:
        names = _name_harmed(clients)
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


def _name_harmed(clients: ClientColumns | None) -> str:
    if clients is None:
        return ""
    harmed = np.flatnonzero(clients.status == STATUS.index("harmed"))
    names = [clients.names[place] for place in harmed[:MOST_NAMED]]
    more = ["..."] if len(harmed) > MOST_NAMED else []
    return ", ".join(names + more)


def _how_sure(gain: GainSummary, seeds: int) -> str:
    over = "1 run" if seeds == 1 else f"{seeds} repeated runs"
    return (
        f"How sure: intervals are 95 %, over {gain.clients:,} clients and {over}. By "
        f"chance alone at most {gain.by_chance:,} of {gain.clients:,} clients would be "
        "called worse off (in 95 of 100 cases)."
    )


def several_sentences(
    found: dict[str, Headline], pairs: Sequence[dict[str, Any]]
) -> tuple[str, list[str]]:
    """The verdict on several runs: which is best, how sure, and whether it pays.

    Args:
        found: headlines of runs by name, of the same split and metric.
        pairs: of ``differences``, as plain values; empty where they are not known.
    """
    values = {name: _own(head) for name, head in found.items()}
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    if not known:
        return "open", ["Nothing comparable was measured in these runs."]
    some = next(iter(found.values()))
    order = sorted(known, key=lambda name: known[name], reverse=some.higher)
    best, metric = found[order[0]], some.metric
    lines = [
        f"Best on average: {order[0]}, {name_of(metric)} "
        f"{value_text(known[order[0]], metric)} on {some.split} rows."
    ]
    if len(order) > 1:
        lines.append(_ahead(order[0], order[1], known, metric, pairs))
    tone = "open"
    if best.gain is not None and best.gain.clients:
        tone, (answer, numbers) = _does_it_pay(best, best.gain)
        for pair in pairs:
            if {pair["run"], pair["other"]} == {order[0], ALONE}:
                sure = tone != "open" and pair["significant"]
                tone = tone if sure else "open"
                answer = answer if sure else NOT_CLEAR
                still = "is still clear of chance" if sure else "may be chance"
                numbers += f" Among all {len(pairs)} comparisons here, that {still}."
        lines += [f"{answer} {numbers}", who_gains(best.gain)]
    return tone, lines


def _own(head: Headline) -> float:
    """The model that clients end with: the shared one where there is no other."""
    return head.models.get("personal", head.models.get("shared", math.nan))


def _ahead(
    first: str,
    second: str,
    known: dict[str, float],
    metric: str,
    pairs: Sequence[dict[str, Any]],
) -> str:
    """How far the best run is ahead of the next, and whether that may be chance."""
    gap = points(abs(known[first] - known[second]), metric)
    text = f"Next is {second}, {gap} behind"
    for pair in pairs:
        if {pair["run"], pair["other"]} == {first, second} and pair["low"] is not None:
            sign = 1 if pair["run"] == first else -1
            low, high = sorted((sign * pair["low"], sign * pair["high"]))
            may = "this is clear of chance" if pair["significant"] else "may be chance"
            text += f" (95 % interval: {interval(low, high, metric)}); {may}"
    return f"{text}."


def client_sentences(clients: ClientColumns) -> tuple[str, list[str]]:
    """The verdict for a client about itself; there is no other in the columns."""
    state = STATUS[int(clients.status[0])]
    other, metric = clients.reference, clients.metric
    if other is None or metric is None or state == "unknown":
        return "open", ["There is nothing to compare your model with."]
    if state == "not finite":
        return "bad", ["Your personal model is broken: its numbers are not finite."]
    rival = measures.OTHERS[other]
    gain = float(clients.gains[other][0])
    low, high = (float(clients.gains[f"{other}_{end}"][0]) for end in ("low", "high"))
    size = points(abs(gain), metric)
    word = "better" if gain >= 0 else "worse"
    numbers = f"Your personal model is {size} {word} than {rival}."
    if gain == 0:
        numbers = f"Your personal model is as good as {rival}."
    if math.isfinite(low) and math.isfinite(high):
        numbers += f" 95 % interval of the gain: {interval(low, high, metric)}."
    if state == "gains":
        return "good", ["Taking part pays for you.", numbers]
    if state == "harmed":
        return "bad", [f"You are better off with {rival}: use that model.", numbers]
    return "open", ["Your test rows are too few to tell whether you gain.", numbers]
