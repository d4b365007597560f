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

from fedblend import algorithms
from fedblend.config.config import Config
from fedblend.config.constants import smoothness
from fedblend.config.registry import ALGORITHMS
from fedblend.config.schema.algorithm import amount_of_work
from fedblend.config.schema.apfl import Apfl
from fedblend.config.schema.local_work import LocalWork
from fedblend.config.schema.personal import Ditto
from fedblend.config.schema.table import RunError
from fedblend.core import Algorithm, Loss, shared_model
from fedblend.data.federated import FederatedData
from fedblend.local import Work

ROUNDS = 5
"""Local work of so many rounds is what newcomers do where nothing is said; figure 6 of
the APFL paper has five epochs, one a round."""


class Place(NamedTuple):
    """Where options state the work on a client's own model."""

    steps: str = "steps"
    rate: str = "rate"
    table: str | None = None


_PLACES = {
    "finetune": Place(table="tune"),
    "ditto": Place(table="personal"),
    "perfedavg": Place("adapt_steps", "inner_rate"),
    "fedrep": Place("head_steps"),
}
_TUNED = ("finetune", "reptile", "fomaml", "perfedavg")
"""Whose options say how a client comes from the shared model to its own."""
_SOLVED = ("flix", "flix_local")


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
    options = _same_for_all(_stated(config.algorithm))
    name, entry = options.name, ALGORITHMS[options.name]
    if name in _SOLVED:
        _refuse(name, steps=steps, rate=rate)
        # Only the solver of x_i computes anything; what follows is never run.
        still = {"rate": 1.0, "optimizer": None, "schedule": None}
        options = options.model_copy(update=still)
    else:
        rounds = config.run.rounds if name == "local_only" else ROUNDS
        options = _work_stated(options, steps, rate, 0 if name in _TUNED else rounds)
    visits = 0 if name in _TUNED + _SOLVED else 1
    if name.startswith("apfl"):
        visits = _number_of_steps(options, newcomers.train.capacity)
        options = options.model_copy(update={"steps": 1, "epochs": None})
    known = smoothness(config.model, loss[0], newcomers) if entry.constants else None
    algorithm = entry.make(loss[1], options, known, newcomers.clients)
    if algorithm.personal is not shared_model:
        return Joining(algorithm, visits)
    work = amount_of_work(options)
    plain = algorithms.fedavg(loss[1], Work(options.chosen(), **work))
    return Joining(
        algorithms.finetune(plain, loss[1], Work(options.chosen(), **work)), 0
    )


def _stated(options: Any) -> Any:
    """The options, of another algorithm where that one says what newcomers do."""
    if options.name in ("l2gd", "pfedme"):
        work = ("rate", "steps", "batch_size")
        own: dict[str, Any] = {key: getattr(options, key) for key in work}
        if options.name == "pfedme":
            own |= {"rate": options.inner_rate, "steps": options.inner_steps}
        personal = LocalWork(**own)
        return Ditto(name="ditto", lam=options.lam, personal=personal, **own)
    if options.name == "apfl_agnostic":
        keys = [key for key in Apfl.model_fields if hasattr(options, key)]
        return Apfl(**{key: getattr(options, key) for key in keys} | {"name": "apfl"})
    if options.name == "apfl":
        return options.model_copy(update={"aggregated": True})
    return options


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
    place = _PLACES.get(options.name, Place())
    work = options if place.table is None else getattr(options, place.table)
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
    if place == Place():
        return options.model_copy(update=changes)
    # What is done for the shared model is thrown away: as little of it as can be.
    least = {"steps": 1, "epochs": None, "schedule": None}
    if place.table is None:
        return options.model_copy(update=least | changes)
    return options.model_copy(
        update={**least, place.table: work.model_copy(update=changes)}
    )


def _number_of_steps(work: LocalWork, rows: int) -> int:
    """Local steps of a client with so many rows."""
    if work.epochs is None:
        return int(np.mean(work.steps))  # pyright: ignore
    return work.epochs * -(-rows // (work.rows() or rows))
