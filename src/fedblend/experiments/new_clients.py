# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models for clients that join after training, by the algorithm of a configuration.

``simulation.personalize`` computes them: a new client enrolls at the shared model,
takes part in some rounds in which the message stays the same ("visits"), then deploys
``personal``. Algorithms differ in the options that state the steps on a client's own
model, and in the number of visits:

- one model for all clients (FedAvg and its like): fine-tuning from it, no visits;
- fine-tuning of their own (finetune, reptile, fomaml, perfedavg): just that, no visits;
- FLIX: x_i by the run's solver, mixed with the shared model, no visits;
- a model of its own, trained against the message (Ditto, MAPPER, FedRep, training
  alone): one visit of as many steps;
- pFedMe and L2GD: Ditto's steps with their lam. With a fixed shared model pFedMe's
  inner problem is Ditto's, and the expected step of L2GD is Ditto's step;
- APFL: visits of one step each, so that the shared model is fixed: equation (17).

Numbers given for each client are replaced by their mean; rates have no schedule.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.finetune import finetune
from fedblend.config.build import Built
from fedblend.config.config import Config
from fedblend.config.model import loss_name, smoothness
from fedblend.config.schema.algorithm import LocalWork
from fedblend.core import Algorithm, Down, Key, Loss, PyTree, shared_model
from fedblend.data.federated import FederatedData
from fedblend.errors import RunError
from fedblend.experiments import run_folder
from fedblend.gains import Evidence
from fedblend.metrics import Metric
from fedblend.simulation.personalize import NewClients, personalize
from fedblend.simulation.run import Run

ROUNDS = 5
"""The rounds of local work that new clients do by default; figure 6 of the APFL paper
has five epochs, one a round."""


def new_clients(
    config: Config,
    loss: tuple[str, Loss],
    data: FederatedData,
    shared: PyTree,
    key: Key,
    *,
    measure: Mapping[str, Metric],
    splits: Sequence[str] | None,
    steps: int | None = None,
    rate: float | None = None,
) -> NewClients:
    """A model for each client that joins after training, with its metrics.

    Args:
        config: the configuration of the run.
        loss: its name, and the loss itself.
        data: the rows of the new clients.
        shared: the shared model of the run.
        key: the seed.
        measure: metrics by name.
        splits: the splits to measure on, all there are if None.
        steps: local steps on the clients' own models; if None as the algorithm says,
            or those of ``ROUNDS`` rounds.
        rate: the rate of these steps, plain SGD; the optimizer of the run if None.

    Raises:
        RunError: the algorithm does not use ``steps`` or ``rate``.
    """
    algorithm, visits = client_work(config, loss, data, steps=steps, rate=rate)
    down = Down(jax.tree.map(jnp.asarray, shared), jnp.zeros((), jnp.int32))
    return personalize(
        algorithm, down, data, key, visits=visits, measure=measure, splits=splits
    )


def unseen_clients(run: Run, config: Config, built: Built) -> list[NewClients]:
    """The clients that ``data.unseen`` sets apart, for each seed."""
    loss = (loss_name(config, built.task), built.loss)
    found = []
    for replica, shared in enumerate(run_folder.models(run)):
        found.append(
            new_clients(
                config,
                loss,
                built.unseen[replica if len(built.unseen) > 1 else 0],
                shared,
                run.key if run.replicas is None else run.key[replica],
                measure=built.measures,
                splits=config.measure.splits,
            )
        )
    return found


def evidence_of(found: Sequence[NewClients]) -> Evidence:
    """The evidence of all seeds together."""
    each = [one.evidence for one in found]
    return each[0]._replace(
        measured=[one.measured[0] for one in each],
        by_row=[one.by_row[0] for one in each],
    )


def client_work(
    config: Config,
    loss: tuple[str, Loss],
    data: FederatedData,
    *,
    steps: int | None = None,
    rate: float | None = None,
) -> tuple[Algorithm, int]:
    """What a new client runs, and in how many visits; see ``new_clients``."""
    options: Any = _same_for_all(config.algorithm)
    kind = options.entry.new_client
    if kind.steps is None:
        _refuse(options.name, steps=steps, rate=rate)
        # Only the solver of x_i computes anything; the local work never runs.
        still = {"rate": 1.0, "optimizer": None, "schedule": None}
        options = options.model_copy(update=still)
    else:
        rounds = config.run.rounds if kind.whole_run else ROUNDS
        options = _work_stated(options, steps, rate, 0 if kind.visits == 0 else rounds)
    visits = kind.visits
    if visits is None:
        visits = _number_of_steps(options, data.train.capacity)
        options = options.model_copy(update={"steps": 1, "epochs": None})
    known = None
    if "smooth" in options.entry.parameters:
        known = smoothness(config.model, loss[0], data)
    algorithm = options.build(loss[1], known, data.clients, new_client=True)
    if algorithm.personal is not shared_model:
        return algorithm, visits
    work = options.work()
    return finetune(fedavg(loss[1], work), loss[1], work), 0


def _same_for_all(options: Any) -> Any:
    """Numbers for each client replaced by their mean; a new client has none."""
    lists = {
        key: float(np.mean(value))
        for key in ("alpha", "lam")
        if isinstance(value := getattr(options, key, None), list)
    }
    return options.model_copy(update=lists)


def _refuse(name: str, **given: float | None) -> None:
    for key, value in given.items():
        if value is not None:
            raise RunError(
                f"{key}: {value} has no meaning here; {name} finds the model of a new "
                "client with the run's solver, algorithm.personal"
            )


def _work_stated(
    options: Any, steps: int | None, rate: float | None, rounds: int
) -> Any:
    """The options with these steps at this rate on a client's own model.

    Without ``steps``, the steps of so many rounds; with 0 rounds those of the options.
    """
    entry = options.entry
    table, place = entry.keys.get("work"), entry.new_client
    work = options if table is None else getattr(options, table)
    changes: dict[str, Any] = {"schedule": None}
    counted = place.steps == "steps" and work.epochs is not None
    if steps is not None:
        changes |= {place.steps: steps} | ({"epochs": None} if counted else {})
    elif rounds:
        key = "epochs" if counted else place.steps
        changes[key] = rounds * round(float(np.mean(getattr(work, key))))
    if rate is not None:
        changes[place.rate] = rate
        changes |= {"optimizer": None} if place.rate == "rate" else {}
    if table is None and place.steps == "steps":
        return options.model_copy(update=changes)
    # The update of the shared model is discarded: as little work on it as possible.
    least = {"steps": 1, "epochs": None, "schedule": None}
    if table is None:
        return options.model_copy(update=least | changes)
    return options.model_copy(update={**least, table: work.model_copy(update=changes)})


def _number_of_steps(work: LocalWork, rows: int) -> int:
    """The local steps of a client with so many rows."""
    if work.epochs is None:
        return int(np.mean(work.steps))  # pyright: ignore
    return work.epochs * -(-rows // (work.rows() or rows))
