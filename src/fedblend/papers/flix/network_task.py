# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9's tasks: data, a model and how much is run on them, and how a run is scored.

A task is run the same way whatever its data is, see ``network_runs``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fedblend as fb
from fedblend.core import Loss
from fedblend.data.dataset import Dataset

ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9)
BLOCKS = 6
"""A run is measured so many times, and before it begins."""


class Work(NamedTuple):
    """What a client does at a time, and the rates that are tried."""

    rates: tuple[float, ...]
    steps: int
    batch_size: int


class Plan(NamedTuple):
    """How much is run.

    ``lanes`` are run and ``clients`` train x_i side by side; both bound the memory.
    FLIX's rates are divided by ``alpha**power``: a step of the mixture is ``alpha``
    times one of the shared model, and the gradient has one more factor ``alpha``,
    which Adam takes out. Without ``local_rounds`` FLIX with local steps is left out.
    """

    rounds: int
    local_rounds: int
    seeds: int
    cohort: int
    lanes: int
    clients: int
    own: Work
    flix: Work
    power: int
    fedavg: Work
    tune: Work


class Task(NamedTuple):
    """Data, a model, and how much is run on them."""

    federation: fb.Federation
    model: fb.Model
    loss: Loss
    accuracy: Callable
    server: Callable[[Any], optax.GradientTransformation]
    plan: Plan


class Lane(NamedTuple):
    """One run of a method; ``own`` says which x_i, where there are any."""

    own: int
    alpha: float
    rate: float
    seed: int


class Score(NamedTuple):
    """Accuracies of a run: by examples over the rounds and on validation rows at the
    end, and each client's own at the end.
    """

    rounds: np.ndarray
    test: np.ndarray
    validation: float
    clients: np.ndarray


Scores = dict[Lane, Score]


def largest(dataset: Dataset, clients: int) -> Dataset:
    """The rows of the clients that have most, and their test rows."""
    keys = np.asarray(dataset.keys)
    names, counts = np.unique(keys, return_counts=True)
    chosen = names[np.argsort(-counts, kind="stable")[:clients]]

    def part(rows, keys):
        kept = np.isin(keys, chosen)
        return tuple(values[kept] for values in rows), keys[kept]

    rows, keys = part(dataset.rows, keys)
    smaller = dataset._replace(rows=rows, keys=keys)
    if dataset.test_rows is None:
        return smaller
    rows, keys = part(dataset.test_rows, np.asarray(dataset.test_keys))
    return smaller._replace(test_rows=rows, test_keys=keys)


def start(task: Task) -> Any:
    """The parameters at which everything starts."""
    return task.model.init(jax.random.key(0))


def completed(
    task: Task, build, params, rounds: int, *, over, key=None, chunk=None, measured=True
) -> fb.Run:
    """A completed run of the task; with ``chunk``, everybody takes part."""
    clients = task.federation.clients
    return fb.simulate(
        build,
        params,
        task.federation,
        jax.random.key(0) if key is None else key,
        rounds=rounds,
        cohort=min(task.plan.cohort if chunk is None else clients, clients),
        chunk=chunk,
        every=max(-(-rounds // BLOCKS), 1),
        store="device",
        measure={"accuracy": task.accuracy},
        splits=("validation", "test"),
        over=over,
    ).complete()


def scores_of(run: fb.Run) -> list[Score]:
    """The scores of each lane of a completed run."""
    found = []
    for lane in range(run.lanes or 1):
        records = [record[lane] for record in run.records]
        measures = [record.measures for record in records]
        found.append(
            Score(
                np.array([record.round for record in records]),
                np.array(
                    [m["test"]["personal"]["accuracy"].weighted for m in measures]
                ),
                measures[-1]["validation"]["personal"]["accuracy"].weighted,
                run.measured[lane]["test"]["personal"]["accuracy"],
            )
        )
    return found
