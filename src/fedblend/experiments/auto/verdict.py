# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict of a comparison in three sentences: what to deploy, who gains, how sure.

``scores`` are the criterion of every method on test rows, mean over clients and splits.
"""

from collections.abc import Mapping, Sequence

from fedblend.experiments.auto.candidates import ALONE, BY_NAME, FEW_CLIENTS
from fedblend.experiments.auto.decision import Clients, Findings
from fedblend.experiments.differences import LEVEL

NAMED = 5
"""Names that a list shows."""
TINY = 0.0001
"""Below it a p-value has no meaning of its own."""


def sentences(
    of: Findings,
    scores: Mapping[str, float],
    criterion: str,
    left_out: Sequence[str] = (),
    unfinished: Sequence[str] = (),
) -> tuple[str, str, str]:
    """What to deploy; who gains and who does not; how sure that is.

    Args:
        of: what was found.
        scores: see the module's text.
        criterion: its name.
        left_out: titles of the methods that there was no time for.
        unfinished: titles of those that were still improving in their last round.
    """
    shown = {name: f"{score:.4g}" for name, score in scores.items()}
    if not of.informative:
        what = (
            "Deploy nothing yet: no method predicts the target clearly better than a "
            "constant does, so this table cannot tell what to deploy."
        )
    elif of.choice.method == ALONE:
        what = _alone(of, shown, criterion)
    else:
        what = _together(of, shown, criterion)
    sure = _how_sure(of, criterion)
    if left_out:
        sure += f"; there was no time for {listed(left_out)}"
    if unfinished:
        sure += f"; more rounds might improve {listed(unfinished)}"
    return what, _who(of), f"{sure}."


def _alone(of: Findings, shown: Mapping[str, str], criterion: str) -> str:
    others = [name for name in of.choice.alike if name != ALONE]
    why = "every federated method is clearly worse"
    if others:
        why = "no federated method is clearly better"
    best = of.versus_alone
    return (
        f"Train alone: {why} (test {criterion} {shown[ALONE]} alone, {shown[best]} by "
        f"{_title(best)}, the best of them on validation rows)."
    )


def _together(of: Findings, shown: Mapping[str, str], criterion: str) -> str:
    method = of.choice.method
    # Simpler ones among these are no clear gain over training alone.
    place = of.choice.alike.index(method)
    simpler, alike = of.choice.alike[:place], of.choice.alike[place + 1 :]
    why = "it is the best on average" if simpler else "it is clearly the best"
    if alike:
        others = listed([f"{_title(name)} {shown[name]}" for name in alike])
        pay = "pay and " if simpler else ""
        why = f"it is the simplest of those that {pay}cannot be told apart ({others})"
    return (
        f"Deploy {_title(method)} (test {criterion} {shown[method]}; alone "
        f"{shown[ALONE]}): {why}."
    )


def _who(of: Findings) -> str:
    who, title = of.who, _title(of.versus_alone)
    text = f"{title} scores better than training alone for {who.better} of "
    text += f"{who.measured} clients; {_judged(who)}"
    others = [name for name in of.shared_harms if name not in who.harmed]
    if others and of.versus_alone != "fedavg":
        text += f"; FedAvg's one model for all would harm {listed(others)}"
    return f"{text[0].upper()}{text[1:]}."


def _judged(who: Clients) -> str:
    """Who clearly gains, and who is better off alone."""
    if not len(who.gain) + len(who.harmed) + who.undecided:
        return "none has enough test rows to be judged by itself"
    text = f"judged by its own test rows {len(who.gain)} clearly "
    text += "gains" if len(who.gain) == 1 else "gain"
    if 0 < len(who.gain) <= NAMED:
        text += f" ({listed(who.gain)})"
    if who.harmed:
        verb = "is" if len(who.harmed) == 1 else "are"
        text += f", {listed(who.harmed)} {verb} better off alone"
    else:
        text += ", none is clearly better off alone"
    if who.undecided:
        text += f", and {_have(who.undecided)} too few rows to be sure"
    return text


def _how_sure(of: Findings, criterion: str) -> str:
    mean, low, high = of.mean_gain
    chance = f"p = {of.p:.2g}" if of.p >= TINY else f"p < {TINY}"
    test = "a signed-rank test over clients"
    if of.clients < FEW_CLIENTS:
        test = "a t-test over splits"
    test += f" after Holm's correction for {of.comparisons} ({chance})"
    title = _title(of.versus_alone)
    text = f"How sure: over {of.clients} clients and {of.splits} splits {title} "
    if mean < 0:
        text += (
            f"is worse than training alone by {-mean:.3g} in test {criterion} on "
            f"average (95 % interval {-high:.3g} to {-low:.3g})"
        )
        who = (
            "that most clients gain is" if of.p < LEVEL else "that it is better is not"
        )
        text += f"; {who} clear by {test}"
    else:
        text += (
            f"improves the test {criterion} of training alone by {mean:.3g} on average "
            f"(95 % interval {low:.3g} to {high:.3g}), "
        )
        sure = "clear" if of.p < LEVEL else "not clear"
        # The mean and the ranks answer two questions, and may answer them differently.
        if of.p < LEVEL and low <= 0:
            sure = "not clear on average, but clear for most clients"
        text += f"{sure} by {test}"
    if of.who.small:
        text += f"; {_have(of.who.small, 'client')} too few test rows to be judged"
    return text


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


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, no more than a few.

    >>> listed(["Meadow", "Priory", "Harbour"])
    'Meadow, Priory and Harbour'
    """
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
