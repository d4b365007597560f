# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict of ``fedblend auto`` in words.

``scores`` are the criterion of every trained method on test rows, mean over clients and
splits.
"""

from collections.abc import Mapping, Sequence

from fedblend.runs.auto.candidates import ALONE, BY_NAME, OWN_TREES, POOLED_TREES
from fedblend.runs.auto.verdict import FEW_CLIENTS, Findings, Gainers

_TREES = {ALONE: "", OWN_TREES: ", with boosted trees"}
LIMIT = 0.05
"""Part of what the best method gains over a constant that linear models may miss."""
NAMED = 5
"""Names that a list shows."""
WORSE = {
    "alone": "is clearly worse",
    "open": "is not clearly better",
    "negligible": "is better by a negligible amount only",
}
"""Why clients train alone, by the answer of the question that decides."""
BETTER = {
    "together": ("clearly", ""),
    "likely": ("likely", ", which this table is too small to show clearly"),
}
"""How sure it is that the method that is deployed is better, and what to add."""
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
    by_rank = of.answer == "together" and of.mean_gain[1] <= 0
    most = 2 * of.who.better > of.who.measured
    whom = " for most clients" if by_rank and most else ""
    if not of.informative:
        what = (
            f"Deploy nothing yet: {_title(of.better)}, the best method on validation "
            "rows, does not predict the target clearly better than a constant does "
            f"(test {criterion} {shown[of.better]}; constant {of.constant:.4g}), so "
            + ("it is too early to tell" if left_out else "this table cannot tell")
            + " what to deploy"
        )
    elif method == ALONE:
        why = WORSE[of.answer]
        what = (
            f"Train alone{_TREES[alone]}: the best federated method, {_title(other)}, "
            f"{why} (test {criterion} {shown[alone]} alone, {shown[other]} with it)"
        )
    else:
        sure, doubt = BETTER[of.answer]
        what = (
            f"Deploy {_title(method)}: it is {sure} better than training alone{whom} "
            f"(test {criterion} {shown[method]}; alone{_TREES[alone]} {shown[alone]})"
            f"{doubt}"
        )
    what += _limit(of, scores, shown)
    if failed:
        what += f". {_failures(failed)}"
    if left_out:
        what += f". There was no time for {join_names(left_out)}, which may be better"
    return [f"{what}.", _who(of) + _others(of, shown), _how_sure(of, criterion)]


def _limit(of: Findings, scores: Mapping[str, float], shown: Mapping[str, str]) -> str:
    """What linear models miss, where trees or networks are much better."""
    linear = {
        name: of for name, of in scores.items() if BY_NAME[name].model == "linear"
    }
    best = min(linear, key=lambda name: linear[name])
    other = min(scores, key=lambda name: scores[name])
    unit = of.constant - scores[other]
    if not of.informative or scores[best] - scores[other] <= LIMIT * unit:
        return ""
    text = f". Linear models are the limit: the best one, {_title(best)}, scores "
    text += f"{shown[best]}, {_title(other)} {shown[other]}"
    if other == POOLED_TREES:
        text += ", which a federation cannot have"
    return text


def _others(of: Findings, shown: Mapping[str, str]) -> str:
    alike = [f"{_title(name)} {shown[name]}" for name in of.choice.alike[1:]]
    if not alike or of.choice.method == ALONE or not of.informative:
        return ""
    return f" It is the simplest of the methods that are as good ({join_names(alike)})."


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
    if of.answer in ("open", "likely"):
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


def cost(numbers: int, kind: str) -> str:
    """What a comparison by letters cost."""
    if kind == "regression":
        return f"Every client sent {numbers} numbers, once, for all of this."
    return f"Every client sent {numbers} numbers for all of this."


def deployed(choice: Mapping[str, str], rows: int) -> str:
    """What the models to deploy are trained on, and what the numbers are of."""
    said = f"The deployed model is trained on all {rows:,} rows"
    if choice["method"] == ALONE:
        said = f"The deployed models are trained on all {rows:,} rows, each on its own"
        if choice["alone"] == OWN_TREES:
            said += ", and linear, as fedblend keeps no trees"
    return (
        f"{said}; the numbers are of models that did not see the rows they are scored "
        "on."
    )
