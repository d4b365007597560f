# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Descent with rand-k messages: runs and figures that F4, F5 and F6 share."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import fedblend as fb
from fedblend import theory
from fedblend.compress import rand_k
from fedblend_reproductions.flix.logistic import Problem, optimum
from fedblend_reproductions.flix.solver import gaps, solve
from fedblend_reproductions.plots import banded, legend_above, panels, shades

NAMES = {"dgd": "DGD", "dcgd": "DCGD", "diana": "DIANA"}
RECORDS = 100
BEYOND = 2.5
"""How far beyond gradient descent figures reach that count both ways."""


class Course(NamedTuple):
    """The curve of a solver: ``gaps[alphas, seeds, records]`` of ``f~ - f~*``.

    ``floats`` are those a client sent, places drawn from keys that both sides know,
    and without the first message that makes x_avg.
    """

    solver: str
    k: int
    dim: int
    rounds: np.ndarray
    floats: np.ndarray
    gaps: np.ndarray

    @property
    def both(self) -> np.ndarray:
        """Numbers a client sent and received: the model of every round is dense."""
        return self.floats + self.rounds * self.dim

    @property
    def label(self) -> str:
        """For a legend that datasets of different d share."""
        if self.solver == "dgd":
            return NAMES[self.solver]
        share = "1" if self.k == 1 else f"{self.k / self.dim:.1g} d"
        return f"{NAMES[self.solver]} k = {share}"

    def first_below(self, targets: Sequence[float] | np.ndarray) -> np.ndarray:
        """The first record of each alpha whose mean over seeds is so small, or -1."""
        below = self.gaps.mean(axis=1) <= np.asarray(targets)[:, None]
        return np.where(below.any(axis=1), below.argmax(axis=1), -1)

    def spent(self, across: str, targets: Sequence[float] | np.ndarray) -> np.ndarray:
        """The rounds, floats or numbers both ways until these targets, or infinity."""
        record = self.first_below(targets)
        return np.where(record >= 0, getattr(self, across)[record], np.inf)


AXES = {
    "rounds": "rounds",
    "floats": "thousands of floats sent",
    "both": "thousands sent and received",
}
"""What figures have across, by their names."""


def step_of(of: Problem, solver: str, k: int, alpha: float) -> float:
    """The paper's step: the strongly convex one with a penalty, else the convex.

    Theorems 4 and 5 have four times the steps of 6 and 7. fedblend's own step of DIANA
    is longer, see ``theory.steps``.
    """
    if solver == "dgd":
        return theory.steps.dgd(alpha, of.smoothness)
    steps = {"dcgd": theory.steps.dcgd_convex, "diana": theory.steps.diana_convex}
    times = 4 if of.l2 > 0 else 1
    return times * steps[solver](alpha, of.smoothness, of.dim / k - 1)


def course(
    of: Problem,
    solver: str,
    k: int,
    alphas: Sequence[float],
    *,
    rounds: int,
    seeds: int,
    records: int = RECORDS,
    memory: str = "zero",
    until: float = 0.0,
    start: np.ndarray | None = None,
    seed: int = 0,
) -> Course:
    """Run a solver at its theoretical step.

    Args:
        of: the clients.
        solver: "dgd", "dcgd" or "diana".
        k: entries of a message; all of them for "dgd".
        alphas: weights of the shared model.
        rounds: at most.
        seeds: how many; "dgd" needs one.
        records: about how many.
        memory: how DIANA's memories start, see ``fb.transforms.diana``.
        until: see ``solve``.
        start: see ``solve``.
        seed: see ``solve``.
    """
    wraps = {
        "dgd": lambda algorithm: algorithm,
        "dcgd": lambda algorithm: fb.transforms.compressed(algorithm, rand_k(k)),
        "diana": lambda algorithm: fb.transforms.diana(
            algorithm, rand_k(k), start=memory
        ),
    }
    trace = solve(
        of,
        alphas,
        [step_of(of, solver, k, alpha) for alpha in alphas],
        rounds=rounds,
        every=max(rounds // records, 1),
        seeds=seeds,
        wrap=wraps[solver],
        until=until,
        start=start,
        seed=seed,
    )
    gap = gaps(of, alphas, trace.points)
    return Course(solver, k, of.dim, trace.rounds, trace.floats, gap)


def rounds_to_settle(of: Problem, solver: str, k: int, times: float, most: int) -> int:
    """``times`` the slower of ``1/(step mu)`` and d/k, at which memories are filled."""
    slow = 1 / (step_of(of, solver, k, 1.0) * of.l2)
    return min(math.ceil(times * max(slow, of.dim / k)), most)


def linear_ks(dim: int, count: int) -> list[int]:
    """Values of k linearly spaced between 1 and d, as in the paper."""
    return [round(k) for k in np.linspace(1, dim, count)]


def evidence(
    courses: dict[str, list[Course]],
    problems: dict[str, Problem],
    alphas: Sequence[float],
) -> dict[str, Any]:
    """All courses, and how exactly the optima were solved, by dataset."""
    return {
        "courses": {
            name: [one._asdict() for one in those] for name, those in courses.items()
        },
        "residuals_of_x*": {
            name: [optimum(of, alpha).residual for alpha in alphas]
            for name, of in problems.items()
        },
    }


def draw(courses: dict[str, list[Course]], alphas: Sequence[float], across: str) -> Any:
    """Loss against one of ``AXES``: a row for each alpha, a column a dataset."""
    with panels(len(alphas), len(courses)) as (figure, axes):
        for column, (name, those) in enumerate(courses.items()):
            colors = ["black", *shades(sum(one.solver != "dgd" for one in those))]
            for one, color in zip(those, colors, strict=True):
                thousands = 1 if across == "rounds" else 1000
                where = getattr(one, across) / thousands
                label = one.label if column == 0 else None
                for row, gap in enumerate(one.gaps):
                    seen = np.where(gap > 1e-14, gap, np.nan)
                    style = {"color": color, "label": label}
                    banded(axes[row, column], where, seen, **style)
            # The smallest k needs by far the most rounds: its end is cut off.
            furthest = those[min(2, len(those) - 1)].rounds[-1]
            for row in range(len(alphas)):
                axes[row, column].set_yscale("log")
                if across == "rounds":
                    axes[row, column].set_xlim(0, 1.2 * furthest)
                else:
                    end = getattr(those[0], across)[-1] / 1000
                    times = 1.05 if across == "floats" else BEYOND
                    axes[row, column].set_xlim(0, times * end)
            axes[0, column].set_title(name)
            axes[-1, column].set_xlabel(AXES[across])
        for row, alpha in enumerate(alphas):
            axes[row, 0].set_ylabel(f"f - f*, alpha {alpha:g}")
        legend_above(figure, axes[0, 0], most=8)
    return figure
