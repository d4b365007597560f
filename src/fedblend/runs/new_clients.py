# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models for clients that join after training, by the algorithm of a configuration.

``simulation.personalize`` computes the models: a new client enrolls at the shared
model, takes part in some rounds in which the message stays the same ("visits"), then
deploys ``personal``. Algorithms differ in the options that state the steps on a
client's own model, and in the number of visits:

- one model for all clients (FedAvg and its like): fine-tuning from it, no visits;
- fine-tuning of their own (finetune, reptile, fomaml, perfedavg): just that, no visits;
- FLIX: x_i by the run's solver, mixed with the shared model, no visits;
- votes of nearest rows: the shared model beside the client's own rows, no visits;
- a model of its own, trained against the message (Ditto, MAPPER, FedRep, training
  alone): one visit of as many steps;
- pFedMe and L2GD: Ditto's steps with their lam. With a fixed shared model pFedMe's
  inner problem is Ditto's, and the expected step of L2GD is Ditto's step;
- APFL: visits of one step each, so that the shared model is fixed: equation (17).

Numbers given for each client are replaced by their mean; rates have no schedule.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.config.config import Config
from fedblend.config.tables.model import smoothness
from fedblend.core import Algorithm, Down, Key, Loss, PyTree, shared_model
from fedblend.data.federated import FederatedData
from fedblend.errors import RunError
from fedblend.metrics import Metric
from fedblend.simulation.personalize import NewClients, personalize

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
    features: Callable[..., jax.Array] | None = None,
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
        features: of the model, where it has them.

    Raises:
        RunError: the algorithm does not use ``steps`` or ``rate``.
    """
    algorithm, visits = client_work(config, loss, data, steps, rate, features)
    down = Down(jax.tree.map(jnp.asarray, shared), jnp.zeros((), jnp.int32))
    return personalize(
        algorithm, down, data, key, visits=visits, measure=measure, splits=splits
    )


def client_work(
    config: Config,
    loss: tuple[str, Loss],
    data: FederatedData,
    steps: int | None = None,
    rate: float | None = None,
    features: Callable[..., jax.Array] | None = None,
) -> tuple[Algorithm, int]:
    """What a new client runs, and in how many visits; see ``new_clients``."""
    options: Any = config.algorithm
    # A new client has no number of its own in a list over clients.
    means = {
        key: float(np.mean(value))
        for key in ("alpha", "lam")
        if isinstance(value := getattr(options, key, None), list)
    }
    options, kind = options.model_copy(update=means), options.entry.new_client
    visits = kind.visits
    if kind.steps is None:
        solved = hasattr(options, "personal")
        how = "with the run's solver, algorithm.personal" if solved else "without steps"
        for key, value in {"steps": steps, "rate": rate}.items():
            if value is not None:
                raise RunError(
                    f"{key}: {value} has no meaning here; {options.name} finds the "
                    f"model of a new client {how}"
                )
        # Only the solver of x_i computes anything; the local work never runs.
        still = {"rate": 1.0, "optimizer": None, "schedule": None}
        options = options.model_copy(update=still)
    else:
        rounds = config.run.rounds if kind.whole_run else ROUNDS
        options = _work_stated(options, steps, rate, 0 if visits == 0 else rounds)
    if visits is None:
        if options.epochs is None:
            visits = int(np.mean(options.steps))
        else:
            rows = data.train.capacity
            visits = options.epochs * -(-rows // (options.rows() or rows))
        options = options.model_copy(update={"steps": 1, "epochs": None})
    known = None
    if "smooth" in options.entry.parameters:
        known = smoothness(config.model, loss[0], data)
    algorithm = options.build(
        loss[1], known, data.clients, features=features, new_client=True
    )
    if algorithm.personal is not shared_model:
        return algorithm, visits
    work = options.work()
    return fb.finetune(fb.fedavg(loss[1], work), loss[1], work), 0


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
