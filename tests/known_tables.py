# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Tables whose truth is known, and what ``fedblend auto`` finds in them.

``python known_tables.py FILE`` judges all of them, with a process for each core.
"""

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedblend.runs.auto.candidates import Request
from fedblend.runs.auto.comparison import AutoComparison, Screen
from fedblend.trees import precision

Table = dict[str, np.ndarray]
KINDS = ("binary", "regression")
TRUTHS: dict[str, tuple[tuple[int, int], Callable[[Any], bool]]] = {
    "nothing": ((20, 150), lambda deploy: deploy is None),
    "alone": ((150, 400), lambda deploy: deploy == "local_only"),
    "one for all": ((15, 80), lambda deploy: deploy == "fedavg"),
    "mixture": (
        (15, 60),
        lambda deploy: deploy in ("own_intercepts", "hierarchical", "flix"),
    ),
    "own level": ((15, 60), lambda deploy: deploy == "own_intercepts"),
}
"""Rows of a client, from and to, and whether a choice is right."""


def known_truth(kind: str, truth: str, seed: int) -> Table:
    """A table of 10 to 40 sites in units of any size, whose coefficients are known.

    In a mixture a site's own part is about as large as the error with which its rows
    alone would tell it: less, and one model for all is as good; more, and each alone.
    """
    order = [*TRUTHS].index(truth)
    draw = np.random.default_rng([seed, KINDS.index(kind), order])
    sites, inputs = int(draw.integers(10, 40)), int(draw.integers(3, 10))
    site = np.repeat(np.arange(sites), draw.integers(*TRUTHS[truth][0], sites))
    shared, own = draw.normal(size=inputs), draw.normal(size=(sites, inputs))
    shared *= 1.5 / np.linalg.norm(shared)
    own *= 1.5 / np.linalg.norm(own, axis=1, keepdims=True)
    weights = {"nothing": (0, 0), "alone": (0, 1), "mixture": (0.7, 0.5)}
    together, apart = weights.get(truth, (1, 0))
    level = (apart or 1.5 * (truth == "own level")) * draw.normal(size=sites)
    x = draw.normal(size=(len(site), inputs))
    score = (x * (together * shared + apart * own)[site]).sum(axis=1) + level[site]
    noise = 1.5 if truth == "mixture" else 1.0
    return _table(draw, site, x, _outcome(draw, kind, score, noise))


def _outcome(draw, kind: str, score: np.ndarray, noise: float) -> np.ndarray:
    if kind == "binary":
        return np.where(draw.random(len(score)) < 1 / (1 + np.exp(-score)), "yes", "no")
    unit = 10 ** draw.uniform(-3, 3)
    return unit * (score + noise * draw.normal(size=len(score))) + 100 * draw.normal()


def _table(draw, site: np.ndarray, x: np.ndarray, outcome: np.ndarray) -> Table:
    """Columns in units of their own, from a millionth to a million."""
    unit = 10 ** draw.uniform(-6, 6, x.shape[1])
    columns = unit * (x + 3 * draw.normal(size=x.shape[1]))
    return {
        "site": np.array([f"site {number}" for number in site]),
        **{f"x{place}": values for place, values in enumerate(columns.T)},
        "outcome": outcome,
    }


def numbers(seed: int) -> Table:
    """A table of complete numbers: any units, outliers, skewed targets, few sites."""
    draw = np.random.default_rng([seed, 7])
    sites, inputs = int(draw.integers(3, 61)), int(draw.integers(2, 15))
    site = np.repeat(np.arange(sites), draw.integers(10, 200, sites))
    x = draw.normal(size=(len(site), inputs))
    mixing = draw.normal(size=(inputs, inputs)) / np.sqrt(inputs)
    x = 0.6 * x + 0.8 * x @ mixing  # columns that go together
    apart = draw.choice([0.0, 0.3, 1.0])
    slopes = draw.normal(size=inputs) + apart * draw.normal(size=(sites, inputs))
    level = draw.choice([0.0, 1.0, 3.0]) * draw.normal(size=sites)
    score = (x * slopes[site]).sum(axis=1) / np.sqrt(inputs) + level[site]
    outcome = score + draw.choice([0.1, 1.0]) * draw.normal(size=len(site))
    if draw.random() < 0.4:
        outcome = np.exp(outcome / outcome.std())
    if draw.random() < 0.5:
        wild = draw.random(x.shape) < 0.002
        x = np.where(wild, x + 10 ** draw.uniform(2, 6, x.shape), x)
    return _table(draw, site, x, 10 ** draw.uniform(-6, 6) * outcome)


def judge(columns: Table, place: Path) -> AutoComparison:
    """The comparison of a table in a folder, decided, without runs and a page."""
    path = place / "table.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    found = AutoComparison(
        Request(path, "site", "outcome"), place / "out", 4.0, Screen()
    )
    with precision("float32"):
        found.judge()
    return found


def judge_truth(case: tuple[str, str, int]) -> tuple[tuple[str, str, int], bool, str]:
    """Whether the truth of a case is found, and what is said."""
    with tempfile.TemporaryDirectory() as place:
        state = judge(known_truth(*case), Path(place)).state
    right = state["findings"] is not None and TRUTHS[case[1]][1](state["deploy"])
    return case, bool(right), " ".join(state["verdict"])


def main(out: str, seeds: str = "20") -> None:
    """Judge every truth and kind for so many seeds."""
    cases = [(k, t, s) for s in range(int(seeds)) for k in KINDS for t in TRUTHS]
    with ProcessPoolExecutor() as pool, open(out, "w") as file:
        found = list(pool.map(judge_truth, cases))
        for kind in KINDS:
            for truth in TRUTHS:
                own = [
                    right for (k, t, _), right, _ in found if (k, t) == (kind, truth)
                ]
                print(f"{kind} {truth}: {sum(own)} of {len(own)} right")
        for case, right, said in found:
            print(*case, right, said, sep="\t", file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
