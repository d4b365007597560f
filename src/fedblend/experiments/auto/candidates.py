# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The methods that are compared, the grid that each is tuned over, their settings.

Every grid has the same number of points. A method with a setting of its own crosses a
few values of it with a few rates; a method without one tries as many more rates between
the same ends. Local work is the same for all: ten steps of plain SGD a round.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.config import Config, check

STEPS, BATCH = 10, 32
WORK = {"steps": STEPS, "batch_size": BATCH}
RATES = (0.01, 1.0)
"""The smallest and the largest rate."""
SIZES = {12: (4, 3), 6: (3, 2), 4: (2, 2)}
"""Points of a grid: how many rates, and how many values of the method's own setting."""
FEW_CLIENTS = 10
"""Below it, clients are no sample of anything, and splits are compared."""
LOOKS = 10
"""How often held-out rows are measured in the planned rounds."""
VALIDATION, TEST = 0.2, 0.2
"""What every split holds out of each client's rows."""
MODEL = "softmax"
"""Linear in its inputs; with one output it is logistic or linear regression."""
L2 = 1e-3
"""Keeps the models finite of clients whose rows can be told apart exactly."""


class Candidate(NamedTuple):
    """A method of the comparison."""

    name: str
    title: str
    algorithm: Mapping[str, Any]
    """The table ``[algorithm]`` besides rate, steps and batch size."""
    setting: str | None = None
    """The key of its own setting, in ``[algorithm]``."""
    values: tuple[float, ...] = ()


class Point(NamedTuple):
    """Where a method is in its grid."""

    rate: float
    value: float | None = None


ALONE = "local_only"
CANDIDATES = (
    Candidate(ALONE, "local only", {"name": "local_only"}),
    Candidate("fedavg", "FedAvg", {"name": "fedavg"}),
    Candidate(
        "finetune",
        "fine-tuned",
        {
            "name": "finetune",
            "finetune": {"rate": 0.1, "steps": 30, "batch_size": BATCH},
        },
        "finetune.rate",
        (0.03, 0.1, 0.3),
    ),
    Candidate(
        "partial",
        "partial",
        {"name": "fedrep", "head": ["bias"], "head_steps": STEPS},
    ),
    Candidate(
        "flix",
        "FLIX",
        {
            "name": "flix_local_steps",
            "alpha": 0.5,
            "personal": {"solver": "lbfgs", "tolerance": 1e-3, "most": 50},
        },
        "alpha",
        (0.25, 0.5, 0.75),
    ),
    Candidate(
        "ditto",
        "Ditto",
        {"name": "ditto", "lam": 0.3, "personal": {"rate": 0.1, **WORK}},
        "lam",
        (0.03, 0.3, 3.0),
    ),
    Candidate(
        "apfl",
        "APFL",
        {"name": "apfl", "alpha": 0.5, "learn": "fixed"},
        "alpha",
        (0.25, 0.5, 0.75),
    ),
)
"""The simplest first: this order decides between methods that cannot be told apart."""
BY_NAME = {one.name: one for one in CANDIDATES}


class Request(NamedTuple):
    """What the user asked for."""

    table: Path
    client: str
    target: str
    kind: str | None = None


class Alone(NamedTuple):
    """How clients train alone, once that is tuned."""

    rate: float
    rounds: int


def grid(candidate: Candidate, size: int) -> list[Point]:
    """The points of a candidate's grid, as many for each.

    >>> len(grid(BY_NAME["fedavg"], 12)), len(grid(BY_NAME["ditto"], 12))
    (12, 12)
    """
    rates, values = SIZES[size]
    if not candidate.values:
        return [Point(_rounded(rate)) for rate in np.geomspace(*RATES, size)]
    own = np.linspace(0, len(candidate.values) - 1, values).round().astype(int)
    return [
        Point(_rounded(rate), candidate.values[place])
        for rate in np.geomspace(*RATES, rates)
        for place in own
    ]


def _rounded(rate: float) -> float:
    """Two digits, as a person would write it."""
    return float(f"{rate:.2g}")


def configuration(
    request: Request,
    candidate: Candidate,
    point: Point,
    *,
    seeds: list[int],
    rounds: int,
    metrics: Sequence[str] | None = None,
    alone: Alone | None = None,
) -> Config:
    """The configuration of a candidate at a point of its grid.

    Args:
        request: which table, and what it is about.
        candidate: the method.
        point: its rate, and its own setting.
        seeds: of the splits and of all draws.
        rounds: of communication.
        metrics: what is measured; the usual ones if None.
        alone: how the clients train alone that the run is compared with; None for no
            comparison.
    """
    data = {
        "file": str(request.table),
        "client": request.client,
        "target": request.target,
        "partition": "by_key",
        "validation": VALIDATION,
        "test": TEST,
    }
    if request.kind is not None:
        data["kind"] = request.kind
    measure: dict[str, Any] = {"local": False}
    if alone is not None and candidate.name != ALONE:
        measure = {"local": alone.rounds, "local_rate": alone.rate}
    if metrics is not None:
        measure["metrics"] = list(metrics)
    content = {
        "version": 1,
        "name": f"{request.table.stem}-{candidate.name}",
        "data": data,
        "model": {"name": MODEL, "l2": L2},
        "algorithm": {**candidate.algorithm, **WORK, "rate": point.rate},
        "run": {"rounds": rounds, "seed": seeds, "every": max(rounds // LOOKS, 1)},
        "measure": {**measure, "splits": ["validation", "test"]},
    }
    config = check(content, str(request.table))
    return at(config, candidate, {"rate": point.rate, "value": point.value})


def at(config: Config, candidate: Candidate, point: Mapping[str, Any]) -> Config:
    """The configuration at another point of the grid, whose numbers may be traced."""
    changed = _with(config, "algorithm.rate", point["rate"])
    if candidate.name == "ditto":
        changed = _with(changed, "algorithm.personal.rate", point["rate"])
    if candidate.setting is None:
        return changed
    return _with(changed, f"algorithm.{candidate.setting}", point["value"])


def _with(table: Any, path: str, value: Any) -> Any:
    """A copy of a table with another value deep inside."""
    name, _, rest = path.partition(".")
    inside = _with(getattr(table, name), rest, value) if rest else value
    return table.model_copy(update={name: inside})
