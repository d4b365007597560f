# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX against FOMAML and Reptile on tags from bags of words (Figure 1)."""

from typing import Any, NamedTuple

import numpy as np

from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, lead
from fedblend_reproductions.flix.tag_sweeps import (
    PAPER_INNER,
    FlixSweep,
    Scores,
    flix_sweeps,
    fomaml,
    reptile,
    sweep,
    tuned,
)
from fedblend_reproductions.plots import banded, legend_above, panels


class Comparison(NamedTuple):
    """Recall@5 on test rows for each seed, everything chosen on validation rows."""

    flix: np.ndarray
    """[alphas, seeds], alpha 0 first."""
    inside: np.ndarray
    """FLIX at the best alpha between the ends, [seeds]."""
    alpha: np.ndarray
    """That alpha, [seeds]."""
    others: dict[str, np.ndarray]
    """The other methods, [seeds]."""


def check(quick: bool) -> Finding:
    """Recall@5 over alpha, and that of the others, on both tasks."""
    sweeps = flix_sweeps(quick)
    baselines = [_baselines(found) for found in sweeps]
    by_loss, by_recall = (
        [compare(*pair, by) for pair in zip(sweeps, baselines, strict=True)]
        for by in ("loss", "recall")
    )
    ahead = [mean > 2 * error for mean, error in map(_gain, by_loss)]
    verdict = Verdict.partly if any(ahead) else Verdict.differs
    if all(ahead):
        verdict = Verdict.reproduced
    return Finding(
        verdict,
        " ".join(map(_sentence, sweeps, by_loss, by_recall)),
        {
            found.task.name: _numbers(found, loss, recall)
            for found, loss, recall in zip(sweeps, by_loss, by_recall, strict=True)
        },
        {"recall": _drawn(sweeps, by_loss)},
        _why(sweeps),
    )


def _baselines(found: FlixSweep) -> dict[str, Scores]:
    """The other methods, [outer, inner, seeds]."""
    sizes = found.sizes
    axes = {"outer": sizes.steps, "inner": sizes.inner}
    built = {"FOMAML": fomaml, "Reptile": reptile, "fine-tuned": tuned}
    return {
        name: sweep(found.task, build, rounds=sizes.rounds, **axes)[1]
        for name, build in built.items()
    }


def compare(found: FlixSweep, baselines: dict[str, Scores], by: str) -> Comparison:
    """What each method reaches on test rows where its validation is best.

    Args:
        found: FLIX.
        baselines: the others, [outer, inner, seeds].
        by: "loss" or "recall", on validation rows.
    """
    chosen = found.scores.chosen(1, by)
    inside = np.flatnonzero(found.sizes.alphas < 1)
    between = Scores(*(part[inside] for part in chosen))
    score = between.loss if by == "loss" else -between.recall
    best = between.chosen(1, by)
    # By loss: untrained models score all tags alike, and ties go to frequent ones.
    alone = found.local.chosen(1).tested
    named = found.sizes.inner <= PAPER_INNER
    within = {
        name: Scores(*(part[:, named] for part in scores)).chosen(2, by).tested
        for name, scores in baselines.items()
        if name != "fine-tuned"
    }
    wide = {
        f"{name}, larger inner steps": baselines[name].chosen(2, by).tested
        for name in within
    }
    tuned = {"fine-tuned": baselines["fine-tuned"].chosen(2, by).tested}
    return Comparison(
        flix=np.concatenate([alone[None], chosen.tested]),
        inside=best.tested,
        alpha=found.sizes.alphas[inside][score.argmin(axis=0)],
        others=within | wide | tuned,
    )


def _gain(compared: Comparison, *rivals: str) -> tuple[float, float]:
    """FLIX less the better of some methods, seed by seed: mean and standard error."""
    named = rivals or ("FOMAML", "Reptile")
    best = max((compared.others[name] for name in named), key=np.mean)
    gaps = compared.inside - best
    return float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))


def _sentence(found: FlixSweep, loss: Comparison, recall: Comparison) -> str:
    others = ", ".join(
        f"{name} {values.mean():.3f}" for name, values in loss.others.items()
    )
    mean, error = _gain(loss)
    tuned, tuned_error = _gain(loss, "fine-tuned")
    again, again_error = _gain(recall)
    return (
        f"{found.task.name.capitalize()}: FLIX inside {loss.inside.mean():.3f} (alpha "
        f"{np.median(loss.alpha):g}), alpha 0 {loss.flix[0].mean():.3f}, alpha 1 "
        f"{loss.flix[-1].mean():.3f}, {others}; ahead of FOMAML and Reptile at alpha "
        f"{_ahead(found, loss) or 'none'}; FLIX less the better of FOMAML and "
        f"Reptile {mean:+.3f} ± {error:.3f}, less fine-tuning {tuned:+.3f} ± "
        f"{tuned_error:.3f}; where validation recall chooses instead of loss: FLIX "
        f"{recall.inside.mean():.3f}, {again:+.3f} ± {again_error:.3f}."
    )


def _ahead(found: FlixSweep, compared: Comparison) -> str:
    """The alphas with a higher mean than both."""
    best = max(compared.others[name].mean() for name in ("FOMAML", "Reptile"))
    alphas = np.array([0.0, *found.sizes.alphas])
    return ", ".join(f"{a:g}" for a in alphas[compared.flix.mean(axis=1) > best])


def _why(sweeps: tuple[FlixSweep, ...]) -> str:
    sizes = sweeps[0].sizes
    return (
        "The criterion: on both tasks FLIX at its best alpha inside (0, 1) is ahead of "
        "FOMAML and Reptile by two standard errors; all is chosen on validation rows, "
        "by their loss, the tolerance of x_i too, which gives FLIX one more thing to "
        "choose than the others have. Seeds deal the posts out anew; ± is the "
        "standard error over their differences. A stand-in: TFF's Stack Overflow could "
        "not be had, so "
        "these are posts of quantumcomputing.stackexchange.com, whose users all write "
        "about one subject: there is probably less to personalize than on Stack "
        f"Overflow. {sizes.words} words and {sizes.tags} tags instead of 10000 and "
        f"500; {' and '.join(map(_crowd, sweeps))} instead of 100 workers with 10 rows "
        f"and 50 users with 90; {sizes.rounds} rounds instead of 10000 and 50000. The "
        "loss is the sigmoid cross entropy of every tag (targets are sets of tags, as "
        "in Reddi et al.), without an intercept: only so are the paper's steps of up "
        "to 5e6 of the order of 1/(alpha^2 L). Not in the paper: inner steps beyond "
        f"{PAPER_INNER:g}, and fine-tuning, which is a shared model by gradient "
        "descent and then, like FOMAML and Reptile, five steps of one's own."
    )


def _crowd(found: FlixSweep) -> str:
    splits = found.task.federated_data.splits
    own, held = (_span(splits[name].counts) for name in ("train", "test"))
    workers = found.task.federated_data.clients
    return f"{workers} workers with {own} rows (tested on {held})"


def _span(counts: np.ndarray) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} to {high}"


def _numbers(found: FlixSweep, loss: Comparison, recall: Comparison) -> dict[str, Any]:
    return {
        "alphas": [0.0, *found.sizes.alphas],
        "tolerances": found.sizes.tolerances,
        "tolerance chosen for FLIX": found.tolerance,
        "largest gradient norms of pure local models": found.norms,
        "chosen by validation loss": loss._asdict(),
        "chosen by validation recall@5": recall._asdict(),
    }


def _drawn(sweeps: tuple[FlixSweep, ...], compared: list[Comparison]) -> Any:
    styles = {
        "FOMAML": ("C1", "--"),
        "Reptile": ("C2", "-."),
        "fine-tuned": ("C3", ":"),
    }
    with panels(1, len(sweeps), width=4, height=3.4) as (figure, axes):
        for place, found, values in zip(axes[0], sweeps, compared, strict=True):
            across = [0.0, *found.sizes.alphas]
            banded(place, across, values.flix.T, label="FLIX", marker="o")
            for number, (name, (color, dashes)) in enumerate(styles.items()):
                seeds = values.others[name]
                style = {"color": color, "linestyle": dashes}
                place.axhline(seeds.mean(), label=name, **style)
                # Bands of four methods would hide each other: bars beside the plot.
                side = 1.05 + 0.04 * number
                place.vlines(side, seeds.min(), seeds.max(), color=color, linewidth=4)
            place.set_title(found.task.name)
            place.set_xlabel("alpha (bars: lowest to highest seed of the others)")
        axes[0, 0].set_ylabel("test recall@5")
        legend_above(figure, axes[0, 0], most=2 * len(sweeps))
    return figure


def headline(numbers: Numbers) -> str:
    """FLIX less the better of FOMAML and Reptile, on the first task."""
    found = next(iter(numbers.values()))["chosen by validation loss"]
    rival = max(np.mean(found["others"][name]) for name in ("FOMAML", "Reptile"))
    gap = float(np.mean(found["inside"]) - rival)
    return f"FLIX is {lead(gap, 'the better of FOMAML and Reptile')} in recall@5"


F8 = Claim(
    "F8",
    "Tags of posts against FOMAML and Reptile",
    "For alpha from 0.2 to 0.8 FLIX generalizes better than FOMAML and Reptile, by up "
    "to 11 % in recall@5 with two users' posts among 100 workers (Figure 1a); with a "
    "user each it is best at an alpha inside (0, 1) (Figure 1b).",
    check,
    headline,
    "up to 11 % ahead",
    undecided="the paper's gain is on TFF's Stack Overflow, which could not be had "
    "here; users of the stand-in all write about one subject, so that what is missing "
    "here says nothing of the paper's data",
)
