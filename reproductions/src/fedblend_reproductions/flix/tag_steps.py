# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which step sizes FLIX wants, by alpha (Figures 6 and 7)."""

from typing import Any

import numpy as np

from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict
from fedblend_reproductions.flix.tag_sweeps import FlixSweep, flix_sweeps, lowest
from fedblend_reproductions.plots import panels

THEORY = -2.0
"""The slope of 1 / (alpha^2 L) over alpha, both as logarithms."""


def check(quick: bool) -> Finding:
    """The best step of each alpha, and its slope."""
    sweeps = flix_sweeps(quick)
    steps = [best_steps(found) for found in sweeps]
    falling = [bool((np.diff(best.mean(axis=1)) <= 0).all()) for best in steps]
    slopes = [
        slope(found.sizes.alphas, best)
        for found, best in zip(sweeps, steps, strict=True)
    ]
    # Values of a grid of decades are off by half a decade at either end.
    slack = 1 / np.log10(sweeps[0].sizes.alphas.max() / sweeps[0].sizes.alphas.min())
    close = [abs(values.mean() - THEORY) <= slack for values in slopes]
    verdict = Verdict.reproduced if all(falling + close) else Verdict.partly
    if not any(falling):
        verdict = Verdict.differs
    return Finding(
        verdict,
        " ".join(map(_sentence, sweeps, steps, falling, slopes)),
        {
            found.task.name: {
                "alphas": found.sizes.alphas,
                "steps": found.sizes.steps,
                "validation losses [alphas, steps, seeds]": found.scores.loss,
                "log10 of best steps [alphas, seeds]": best,
                "slopes [seeds]": fitted,
                "1 / L [seeds]": 1 / found.task.smooth.mean(axis=1),
            }
            for found, best, fitted in zip(sweeps, steps, slopes, strict=True)
        },
        {"steps": _drawn(sweeps)},
        f"Reproduced if, on both tasks, the best step (mean of logarithms over seeds) "
        f"never rises with alpha, and its slope is within {slack:.1f} of {THEORY:g}, "
        "which is what a grid of decades lets one see. What the paper's axis calls "
        "scaled is not defined; here the axis is the logarithm of step / 5, whole "
        "numbers on its grid. The best step in validation loss also stops early, and "
        "need not be the fastest. The data are those of F8, with the same "
        "replacements.",
    )


def best_steps(found: FlixSweep) -> np.ndarray:
    """Logarithms of the steps with the lowest validation loss, [alphas, seeds]."""
    return np.log10(found.sizes.steps)[lowest(found.scores.loss, axis=1)[:, 0]]


def slope(alphas: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Of the best steps' logarithms over that of alpha, by least squares, a seed each.

    >>> slope(np.array([0.1, 1.0]), np.array([[4.0], [2.0]]))
    array([-2.])
    """
    return np.polyfit(np.log10(alphas), best, 1)[0]


def _sentence(
    found: FlixSweep, best: np.ndarray, falling: bool, fitted: np.ndarray
) -> str:
    path = ", ".join(
        f"{10**mean:.2g} at {alpha:g}"
        for alpha, mean in zip(found.sizes.alphas, best.mean(axis=1), strict=True)
    )
    verb = "never rises" if falling else "does not always fall"
    return (
        f"{found.task.name.capitalize()}: the best step {verb} with alpha ({path}, "
        f"geometric means over {len(fitted)} seeds), slope {fitted.mean():.2f} "
        f"({fitted.min():.2f} to {fitted.max():.2f})."
    )


def _drawn(sweeps: tuple[FlixSweep, ...]) -> Any:
    import matplotlib
    from matplotlib.patches import Rectangle

    colors = matplotlib.colormaps["viridis"].with_extremes(bad="0.8")
    sizes = sweeps[0].sizes
    width, height = 0.75 * len(sizes.steps), 0.55 * len(sizes.alphas) + 0.8
    with panels(len(sweeps), 1, width=width, height=height) as (figure, axes):
        for place, found in zip(axes[:, 0], sweeps, strict=True):
            with np.errstate(invalid="ignore"):
                cells = np.log10(found.scores.loss).mean(axis=2)
            shades = _by_row(cells)
            place.imshow(shades, cmap=colors, aspect="auto", origin="lower")
            for (row, column), value in np.ndenumerate(cells):
                ink = "white" if shades[row, column] < 0.6 else "black"
                text = f"{value:.2f}" if np.isfinite(value) else ""
                middle = {"ha": "center", "va": "center"}
                place.text(column, row + 0.2, text, fontsize=7, color=ink, **middle)
            for row, column in enumerate(lowest(cells, axis=1)[:, 0]):
                corner = (column - 0.5, row - 0.5)
                place.add_patch(Rectangle(corner, 1, 1, fill=False, color="red", lw=2))
            theory = 1 / (found.sizes.alphas**2 * found.task.smooth.mean())
            columns = np.arange(len(found.sizes.steps))
            at = np.interp(np.log10(theory), np.log10(found.sizes.steps), columns)
            place.plot(
                at, range(len(cells)), "D", color="white", markeredgecolor="black"
            )
            labels = [f"{value:.0f}" for value in np.log10(found.sizes.steps / 5)]
            place.set_xticks(range(len(labels)), labels)
            place.set_yticks(range(len(cells)), [f"{a:g}" for a in found.sizes.alphas])
            place.set_title(f"{found.task.name}: log10 of validation loss")
            place.set_ylabel("alpha")
            place.grid(False)
        axes[-1, 0].set_xlabel("log10(step / 5); diamonds: 1/(alpha^2 L)")
    return figure


def _by_row(cells: np.ndarray) -> np.ndarray:
    """Ranks within rows, from 0 to 1: losses of diverged runs would hide the rest."""
    finite = np.where(np.isfinite(cells), cells, np.inf)
    ranks = finite.argsort(axis=1).argsort(axis=1) / max(cells.shape[1] - 1, 1)
    return np.where(np.isfinite(cells), ranks, np.nan)


def headline(numbers: Numbers) -> str:
    """The power of alpha with which the best step falls."""
    slopes = [np.mean(found["slopes [seeds]"]) for found in numbers.values()]
    return f"The best step size goes like alpha to the power {np.mean(slopes):.2f}"


F11 = Claim(
    "F11",
    "Smaller alpha wants larger steps",
    "The smaller alpha is, the larger the step size of the best validation loss, in "
    "line with the step 1/(alpha^2 L) of the theory (Figures 6 and 7).",
    check,
    headline,
    "power -2",
)
