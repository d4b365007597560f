# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Scafflix' Figure 1: communications of gradient descent and Scafflix on FLIX.

Logistic regression on four LIBSVM datasets with l2 = 0.1, cut into 8 contiguous pieces,
full gradients in float64, alpha from 1 to 1e-4, both methods from a vector of ones.
Gradient descent has the step 1/L_alpha, Scafflix gamma_i = 1/L_i and p = 1/sqrt(mean L
/ 0.1), rounded so that 1/p is whole. A cell is one dataset: the gap ``f~ - min f~``
after every communication, by alpha, for Scafflix the mean over seeds of its coin.

The figure shows curves and no numbers. What it claims is counted: the communications
until the gap is 1e-6 of the first one.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.data.dataset import DataError
from fedblend.trees import precision
from fedblend_reproductions.board.cells import Cell, digest, read_json, source, write
from fedblend_reproductions.claims import plain
from fedblend_reproductions.flix.logistic import L2, NAMES, Problem, problem
from fedblend_reproductions.flix.solver import gaps, solve

NAME, TITLE = "scafflix_figure", "Scafflix' Figure 1"
SOURCE = "Yi, Condat, Richtárik, arXiv:2305.13170, Figure 1: curves without numbers"
ALPHAS = (1.0, 0.1, 0.01, 0.001, 0.0001)
CLIENTS, SEEDS, COMMUNICATIONS, REACHED = 8, 3, 150, 1e-6


def settings(name: str) -> dict[str, Any]:
    """All that a cell's numbers depend on."""
    return plain(
        {
            "task": NAME,
            "data": name,
            "l2": L2,
            "clients": CLIENTS,
            "alphas": ALPHAS,
            "seeds": SEEDS,
            "communications": COMMUNICATIONS,
            "start": "ones",
        }
    )


def measure(name: str, folder: Path) -> Cell:
    """The cell of a dataset: stored, or measured and written.

    Raises:
        DataError: the stored cell has other settings.
    """
    path = folder / NAME / f"{name}.json"
    if path.exists():
        cell = read_json(path, {"settings", "hash", "curve"})
        if cell["hash"] != digest(settings(name)):
            raise DataError(f"{path}: was measured with other settings; delete it")
        return cell
    begun = time.perf_counter()
    of = problem(name, CLIENTS)
    steps = local_steps(of)
    rates = [1 / of.mixture(alpha).L_alpha for alpha in ALPHAS]
    ones = np.ones(of.dim)
    plainly = solve(of, ALPHAS, rates, rounds=COMMUNICATIONS, start=ones)
    curve = {
        "gradient descent": gaps(of, ALPHAS, plainly.points).mean(axis=1),
        "scafflix": gaps(of, ALPHAS, scafflix(of, steps)).mean(axis=1),
    }
    cell = {
        "settings": settings(name),
        "hash": digest(settings(name)),
        **source(),
        "seconds": round(time.perf_counter() - begun, 1),
        "local_steps": steps,
        "curve": plain(curve),
    }
    cell = {**cell, "digest": digest(cell)}
    write(path, cell)
    return cell


def local_steps(of: Problem) -> int:
    """1/p of the figure, as a whole number."""
    return max(round(float(np.sqrt(of.smoothness.smooth.mean() / of.l2))), 1)


def scafflix(of: Problem, steps: int) -> np.ndarray:
    """The shared model after every communication, [alphas, seeds, records, dim]."""
    rates: Any = 1 / of.smoothness.smooth

    def build(alpha):
        algorithm = fb.scafflix(
            of.loss,
            fb.Work(rates, steps=steps, batch_size=None),
            alpha=alpha,
            personal=fb.solvers.given(of.personal),
            smooth=of.smoothness.smooth,
        )

        def start(params, joins, central, key):
            down, server = algorithm.start(params, joins, central, key)
            return down._replace(shared=params), server

        return algorithm._replace(start=start)

    with precision("float64"):
        run = fb.simulate(
            build,
            jnp.ones(of.dim),
            of.federated_data,
            jnp.tile(jax.random.split(jax.random.key(0), SEEDS), len(ALPHAS)),
            rounds=COMMUNICATIONS,
            every=1,
            over=jnp.repeat(jnp.asarray(ALPHAS), SEEDS),
        )
        points = [np.asarray(run.shared) for _ in run]
    return np.stack(points, axis=1).reshape(len(ALPHAS), SEEDS, -1, of.dim)


def communications(gap: Sequence[float]) -> int | None:
    """Communications until the gap is small, or None if it never is."""
    there = np.flatnonzero(np.asarray(gap) <= REACHED * gap[0])
    return int(there[0]) if there.size else None


def check(path: Path) -> list[str]:
    """What is wrong with a stored cell, a line each."""
    cell, problems = read_json(path, {"settings", "hash", "curve", "digest"}), []
    if path.stem not in NAMES or cell["settings"] != settings(path.stem):
        problems.append("its settings are not the board's")
    if digest(cell["settings"]) != cell["hash"]:
        problems.append("its hash is not that of its settings")
    if digest({key: cell[key] for key in cell if key != "digest"}) != cell["digest"]:
        problems.append("it was changed after it was measured")
    return [f"{path}: {problem}" for problem in problems]


def section(folder: Path) -> list[str]:
    """The section of the page."""
    lines = [f"## {TITLE}", "", f"Published: {SOURCE}.", ""]
    stored = {name: folder / NAME / f"{name}.json" for name in NAMES}
    lines += [
        "Communications until the gap is a millionth of the first, gradient descent "
        f"/ Scafflix (mean of {SEEDS} coins), of {COMMUNICATIONS} that were run:",
        "",
        "| data | 1/p | " + " | ".join(f"alpha {alpha:g}" for alpha in ALPHAS) + " |",
        "|---" * (len(ALPHAS) + 2) + "|",
    ]
    for name, path in stored.items():
        if not path.exists():
            lines.append(f"| {name} | not run |" + " |" * len(ALPHAS))
            continue
        cell = read_json(path, {"curve", "local_steps"})
        pairs = [
            " / ".join(
                _counted(cell["curve"][method][place]) for method in cell["curve"]
            )
            for place in range(len(ALPHAS))
        ]
        lines.append(f"| {name} | {cell['local_steps']} | " + " | ".join(pairs) + " |")
    return lines


def _counted(gap: Sequence[float]) -> str:
    found = communications(gap)
    return f"more than {COMMUNICATIONS}" if found is None else str(found)
