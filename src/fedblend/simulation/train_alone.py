# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Training alone, as long as it helps: what every client could do without the others.

The number of rounds is one for all clients, the best for their mean on validation rows
or, where there are none, on a fifth of every client's training rows, which are then
trained on too. On a few rows of a single client the best round is mostly chance;
docs/measures.md has the measurement.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedblend.core import Algorithm, Key, PyTree
from fedblend.data.federated import FederatedData
from fedblend.metrics import Measure, Metric, as_metrics
from fedblend.simulation import early_stopping
from fedblend.simulation.early_stopping import Look
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import measured_ids, simulate

HELD_OUT = 0.2
"""Of every client's training rows, where there are no validation rows."""
ROWS = {True: "validation rows", False: "a held-out fifth of the training rows"}
"""Which rows choose, by whether there are validation rows."""


def train_alone(
    algorithm: Algorithm | Callable[[Any], Algorithm],
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData | Sequence[FederatedData],
    key: Key,
    *,
    rounds: int,
    measure: Mapping[str, Metric | Measure],
    metric: str | None = None,
    **settings: Any,
) -> Run:
    """A run of ``local_only`` to its own best round, for ``simulate(local=...)``.

    Args:
        algorithm: ``local_only``, or with ``over`` a function to it.
        params: as in ``simulate``.
        federated_data: likewise.
        key: likewise; several keys get one number of rounds together.
        rounds: those of the run that is compared with. As many are tried at least, and
            20 at least.
        measure: as in ``simulate``.
        metric: which of them decides; the first besides the loss if None.
        **settings: further ones of ``simulate``, the same as of that run.

    Returns:
        A run of as many rounds as turned out best; ``run.budget`` has the number, and
        how it was found.
    """
    metric = metric or next((name for name in measure if name != "loss"), "loss")
    asked = {**settings, "rounds": rounds, "measure": as_metrics(measure)}
    own = without_others(asked, federated_data, key)
    trial = trying(algorithm, params, federated_data, key, metric, own)
    for _ in prolonged(trial, metric, rounds):
        pass
    run = simulate(algorithm, params, federated_data, key, **own)
    return of_best_length(run, trial, metric, rounds)


def without_others(
    settings: Mapping[str, Any],
    federated_data: FederatedData | Sequence[FederatedData],
    key: Key,
) -> dict[str, Any]:
    """The settings of a run, for all who are measured in every round, each for itself.

    The others need not train.
    """
    clients = _each(federated_data)[0].clients
    ids = measured_ids(settings.get("measure_on"), clients, key)
    return {
        **settings,
        "cohort": None if len(ids) == clients else ids,
        "epoch": None,
        "reduction": "mean",
        "dropout": 0.0,
        "weights": None,
        "central": None,
    }


def trying(
    algorithm: Algorithm | Callable[[Any], Algorithm],
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData | Sequence[FederatedData],
    key: Key,
    metric: str,
    settings: Mapping[str, Any],
) -> Run:
    """A run to be ``prolonged``, that measures only what decides."""
    seen = settings["measure"]
    deciding = {name: seen[name] for name in dict.fromkeys((metric, "loss"))
                if name in seen}  # fmt: skip
    if not all(one.validates for one in _each(federated_data)):
        federated_data = [one.holding_out(HELD_OUT) for one in _each(federated_data)]
    least = early_stopping.least_rounds(settings["rounds"])
    own = {"measure": deciding, "splits": ["validation"], "rounds": least}
    return simulate(algorithm, params, federated_data, key, **{**settings, **own})


def prolonged(run: Run, metric: str, rounds: int) -> Iterator[Any]:
    """Take a run to where more rounds bring no more; a record comes after each block.

    A store on disk goes with a checkpoint of the last block, and of no earlier one.
    """
    least = early_stopping.least_rounds(rounds)
    for at in early_stopping.looks():
        if at < run.round:
            continue
        run.rounds = at
        yield from run
        seen = _looks(run, metric)
        if early_stopping.settled(seen, least) or early_stopping.exhausted(seen, least):
            return


def of_best_length(run: Run, trial: Run, metric: str, rounds: int) -> Run:
    """The run, to be as long as was best in the trial."""
    least, seen = early_stopping.least_rounds(rounds), _looks(trial, metric)
    rows = ROWS[trial.federated_data is run.federated_data]
    run.budget = early_stopping.chosen(seen, least, rows, metric)
    run.rounds = run.budget.rounds or 0
    run.earlier_seconds = sum(_replicas(record)[0].seconds for record in trial.records)
    return run


def _looks(run: Run, metric: str) -> list[Look]:
    """What a run saw, from its records; the mean over clients and seeds."""
    known, found = {}, []
    for record in run.records:
        replicas = [one.measures["validation"]["personal"] for one in _replicas(record)]
        scores = [
            early_stopping.score(
                run.evidence.metrics[name],
                float(np.mean([replica[name].mean for replica in replicas])),
            )
            for name in (metric, "loss" if "loss" in replicas[0] else metric)
        ]
        known[_replicas(record)[0].round] = scores
    for at in early_stopping.looks():
        if at > run.round:
            return [Look(0, *known[0]), *found]
        found.append(Look(at, *known[at]))
    raise AssertionError


def _each(
    federated_data: FederatedData | Sequence[FederatedData],
) -> Sequence[FederatedData]:
    return (
        [federated_data]
        if isinstance(federated_data, FederatedData)
        else federated_data
    )


def _replicas(record: Any) -> list[Any]:
    return record if isinstance(record, list) else [record]
