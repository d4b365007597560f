# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Training alone, as long as it helps: what every client could do without the others.

The number of rounds is one for all clients, the best for their mean on validation rows
or, where there are none, on a fifth of every client's training rows, which are then
trained on too. On a few rows of a single client the best round is mostly chance;
docs/measures.md has the measurement.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedblend.core import Algorithm, Key, PyTree
from fedblend.data.federated import FederatedData
from fedblend.metrics import Measure, Metric, as_metrics
from fedblend.simulation import early_stopping
from fedblend.simulation.early_stopping import HELD_OUT, Look
from fedblend.simulation.run import Run
from fedblend.simulation.sampling import measured_ids
from fedblend.simulation.simulate import set_up
from fedblend.simulation.spec import RunSpec

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
        how it was chosen.
    """
    metric = metric or next((name for name in measure if name != "loss"), "loss")
    metrics = as_metrics(measure)
    asked = RunSpec(
        algorithm, params, federated_data, key, rounds, measure=metrics, **settings
    )
    own = without_others(asked)
    trial = trying(own, metric)
    for _ in prolonged(trial, metric, rounds):
        pass
    return of_best_length(set_up(own), trial, metric, rounds)


def without_others(spec: RunSpec) -> RunSpec:
    """The same run with all measured clients in every round, each for itself."""
    clients = _each(spec.federated_data)[0].clients
    ids = measured_ids(spec.measure_on, clients, spec.key)
    return dataclasses.replace(
        spec,
        cohort=None if len(ids) == clients else ids,
        epoch=None,
        reduction="mean",
        dropout=0.0,
        weights=None,
        central=None,
    )


def trying(spec: RunSpec, metric: str) -> Run:
    """A run to be ``prolonged``, that measures only what decides."""
    data = _each(spec.federated_data)
    if not all(one.validates for one in data):
        data = [one.holding_out(HELD_OUT) for one in data]
    names = [name for name in dict.fromkeys((metric, "loss")) if name in spec.measure]
    own = dataclasses.replace(
        spec,
        federated_data=data,
        measure={name: spec.measure[name] for name in names},
        splits=["validation"],
        rounds=early_stopping.least_rounds(spec.rounds),
    )
    return set_up(own)


def prolonged(run: Run, metric: str, rounds: int) -> Iterator[Any]:
    """Take a run to where more rounds improve nothing; a record after each block.

    A store on disk goes with a checkpoint of the last block, and of no earlier one.
    """
    least = early_stopping.least_rounds(rounds)
    for at in early_stopping.looks():
        if at < run.round:
            continue
        run.rounds = at
        yield from run
        if early_stopping.over(_looks(run, metric), least):
            return


def of_best_length(run: Run, trial: Run, metric: str, rounds: int) -> Run:
    """The run, to be as long as was best in the trial."""
    least, seen = early_stopping.least_rounds(rounds), _looks(trial, metric)
    rows = ROWS[trial.federated_data is run.federated_data]
    run.budget = early_stopping.chosen(seen, least, rows, metric)
    run.rounds = run.budget.rounds or 0
    run.earlier_seconds = sum(record.seconds for record in trial.history())
    return run


def _looks(run: Run, metric: str) -> list[Look]:
    """The scores of a run, from its records; the mean over clients and seeds."""
    metrics = run.evidence.metrics
    names = (metric, "loss" if "loss" in metrics else metric)
    replicas = [run.history(replica) for replica in range(run.replicas or 1)]
    known = {}
    for block in zip(*replicas, strict=True):
        seen = [record.measures["validation"]["personal"] for record in block]
        known[block[0].round] = [
            early_stopping.score(
                metrics[name], float(np.mean([of[name].mean for of in seen]))
            )
            for name in names
        ]
    found = [Look(0, *known[0])]
    for at in early_stopping.looks():
        if at > run.round:
            break
        found.append(Look(at, *known[at]))
    return found


def _each(
    federated_data: FederatedData | Sequence[FederatedData],
) -> Sequence[FederatedData]:
    if isinstance(federated_data, FederatedData):
        return [federated_data]
    return federated_data
