# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9's tasks: data, a model and how much is run on them, and how a run is scored.

All tasks are run alike, see ``network_runs``.
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
FEW, MANY = "few", "many"
"""How x_i were trained: for the first snapshot at the lower rate, and to where training
alone is best on validation rows."""
BLOCKS = 6
"""A run to the end is measured so many times, and before it begins."""


class TunedWork(NamedTuple):
    """What a client does at a time, and the rates that are tried."""

    rates: tuple[float, ...]
    steps: int
    batch_size: int


class Plan(NamedTuple):
    """How much is run.

    All settings of a method are tried for ``trial`` rounds with all seeds, and the best
    ``carried`` ones are run for all ``rounds``. FLIX has the rates of ``local`` over
    alpha^2: a step of the mixture is alpha times one of the shared model, and so is the
    gradient. ``shared_rates`` are FedAvg's, every second one also that of alpha 1.
    ``one`` is a gradient a round, its rates over ``alpha**power`` (Adam takes a factor
    out), with ``one_rates`` for alpha 1; None leaves it out. ``own`` and ``tune`` are
    looked at ``snapshots`` times, after their steps each. ``replicas`` are run and
    ``clients`` train x_i side by side; both bound the memory.
    """

    rounds: int
    trial: int
    carried: int
    seeds: int
    cohort: int
    replicas: int
    clients: int
    snapshots: int
    own: TunedWork
    local: TunedWork
    shared_rates: tuple[float, ...]
    one: TunedWork | None
    power: int
    one_rates: tuple[float, ...]
    tune: TunedWork


class Task(NamedTuple):
    """Data, a model, and how much is run on them."""

    federated_data: fb.FederatedData
    model: fb.Model
    loss: Loss
    accuracy: Callable
    server: Callable[[Any], optax.GradientTransformation]
    plan: Plan

    def settings(self) -> dict[str, Any]:
        """What the result of a single run depends on, as plain values."""
        plan = self.plan
        counts = {
            name: part.counts for name, part in self.federated_data.splits.items()
        }
        names = ("cohort", "snapshots", "own", "local", "one", "tune")
        return {"counts": counts, **{name: getattr(plan, name) for name in names}}


class Setting(NamedTuple):
    """What is tried of a method: ``solver`` is one of ``network_runs.SOLVERS``.

    ``own`` is the kind of x_i; "" for plain FedAvg, which has none.
    """

    solver: str
    own: str
    alpha: float
    rate: float


class Score(NamedTuple):
    """Accuracies of a run: by examples over the rounds and on validation rows at the
    end, and each client's own at the end.
    """

    rounds: np.ndarray
    test: np.ndarray
    validation: float
    clients: np.ndarray


def largest(dataset: Dataset, clients: int) -> Dataset:
    """The rows of the clients that have most, and their test rows."""
    keys = np.asarray(dataset.keys)
    names, counts = np.unique(keys, return_counts=True)
    chosen = names[np.argsort(-counts, kind="stable")[:clients]]

    def part(rows, keys):
        mine = np.isin(keys, chosen)
        return tuple(values[mine] for values in rows), keys[mine]

    rows, keys = part(dataset.rows, keys)
    smaller = dataset._replace(rows=rows, keys=keys)
    if dataset.test_rows is None:
        return smaller
    rows, keys = part(dataset.test_rows, np.asarray(dataset.test_keys))
    return smaller._replace(test_rows=rows, test_keys=keys)


def start(task: Task) -> Any:
    """The parameters at which everything starts."""
    return task.model.init(jax.random.key(0))


def simulated(
    task: Task, build, rounds: int, *, over, key, every: int, chunk: int | None = None
) -> fb.Run:
    """A run of the task; with ``chunk``, all clients take part."""
    clients = task.federated_data.clients
    return fb.simulate(
        build,
        start(task),
        task.federated_data,
        key,
        rounds=rounds,
        cohort=min(task.plan.cohort if chunk is None else clients, clients),
        chunk=chunk,
        every=every,
        store="device",
        measure={"accuracy": task.accuracy},
        splits=("validation", "test"),
        over=over,
    )


def scores_of(run: fb.Run) -> list[Score]:
    """The scores of each replica of a run as it is now."""
    found = []
    for replica in range(run.replicas or 1):
        records = [record[replica] for record in run.records]
        measures = [record.measures for record in records]
        found.append(
            Score(
                np.array([record.round for record in records]),
                np.array(
                    [m["test"]["personal"]["accuracy"].weighted for m in measures]
                ),
                measures[-1]["validation"]["personal"]["accuracy"].weighted,
                run.measured[replica]["test"]["personal"]["accuracy"],
            )
        )
    return found
