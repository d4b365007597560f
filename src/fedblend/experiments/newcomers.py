# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a client does that joins after the training, for every algorithm by name.

All of it goes through ``runtime.newcomers``: enroll at the shared model, some visits to
which the message stays the same, then ``personal``. What differs is where the options
state the steps on a client's own model, and how many visits there are:

- one model for everybody (FedAvg and its like): fine-tuning from it, no visits;
- fine-tuning of its own (finetune, reptile, fomaml, perfedavg): just that, no visits;
- FLIX: x_i by the run's solver, mixed with the shared model, no visits;
- a model of its own, trained against the message (Ditto, MAPPER, FedRep, training
  alone): one visit of as many steps;
- pFedMe and L2GD: Ditto's steps with their lam. With the shared model standing still
  pFedMe's inner problem is Ditto's, and the expected step of L2GD is Ditto's step;
- APFL, however its shared model was trained: visits of one step each, so that this
  model stands still: equation (17). FedTorch's variant deploys another model than it is
  told, and gets (17) with mixed outputs and fixed alpha.

Numbers given for each client are replaced by their mean, rates have no schedule.
"""

from typing import Any, NamedTuple

import numpy as np

from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.finetune import finetune
from fedblend.config.config import Config
from fedblend.config.constants import smoothness
from fedblend.config.schema.local_work import LocalWork
from fedblend.config.schema.table import RunError
from fedblend.core import Algorithm, Loss, shared_model
from fedblend.data.federated import FederatedData

ROUNDS = 5
"""Local work of so many rounds is what newcomers do where nothing is said; figure 6 of
the APFL paper has five epochs, one a round."""


class Joining(NamedTuple):
    """What newcomers do: ``personalize`` takes it."""

    algorithm: Algorithm
    visits: int


def joining(
    config: Config,
    loss: tuple[str, Loss],
    newcomers: FederatedData,
    *,
    steps: int | None = None,
    rate: float | None = None,
) -> Joining:
    """What clients do that join the run of a configuration after its end.

    Args:
        config: of the run.
        loss: its name, and itself.
        newcomers: their data.
        steps: local steps on their own models; the algorithm's own if None, or those
            of ``ROUNDS`` rounds.
        rate: of these steps, plain SGD; the run's own rule if None.

    Raises:
        RunError: the algorithm has no use for ``steps`` or ``rate``.
    """
    options: Any = _same_for_all(config.algorithm)
    kind = options.entry.new_client
    if kind.steps is None:
        _refuse(options.name, steps=steps, rate=rate)
        # Only the solver of x_i computes anything; what follows is never run.
        still = {"rate": 1.0, "optimizer": None, "schedule": None}
        options = options.model_copy(update=still)
    else:
        rounds = config.run.rounds if kind.whole_run else ROUNDS
        options = _work_stated(options, steps, rate, 0 if kind.visits == 0 else rounds)
    visits = kind.visits
    if visits is None:
        visits = _number_of_steps(options, newcomers.train.capacity)
        options = options.model_copy(update={"steps": 1, "epochs": None})
    known = None
    if "smooth" in options.entry.parameters:
        known = smoothness(config.model, loss[0], newcomers)
    algorithm = options.build(loss[1], known, newcomers.clients, new_client=True)
    if algorithm.personal is not shared_model:
        return Joining(algorithm, visits)
    work = options.work()
    return Joining(finetune(fedavg(loss[1], work), loss[1], work), 0)


def _same_for_all(options: Any) -> Any:
    """Numbers for each client replaced by their mean; a newcomer has none."""
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
                f"{key}: {value} has no meaning here; {name} finds a newcomer's own "
                "model with the run's solver, algorithm.personal"
            )


def _work_stated(
    options: Any, steps: int | None, rate: float | None, rounds: int
) -> Any:
    """The options with these steps at this rate on a client's own model.

    Without ``steps`` they are those of so many rounds, or with 0 rounds as they are.
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
    # What is done for the shared model is thrown away: as little of it as can be.
    least = {"steps": 1, "epochs": None, "schedule": None}
    if table is None:
        return options.model_copy(update=least | changes)
    return options.model_copy(update={**least, table: work.model_copy(update=changes)})


def _number_of_steps(work: LocalWork, rows: int) -> int:
    """Local steps of a client with so many rows."""
    if work.epochs is None:
        return int(np.mean(work.steps))  # pyright: ignore
    return work.epochs * -(-rows // (work.rows() or rows))
