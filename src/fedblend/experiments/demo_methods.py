# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The demonstration's five methods, with rates and weights chosen on validation rows: a
fifth of every client's training digits, never the test digits that are reported.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from fedblend import losses, models, solvers
from fedblend.algorithms.apfl import apfl
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.finetune import finetune
from fedblend.algorithms.flix import flix
from fedblend.algorithms.local_only import local_only
from fedblend.core import Algorithm, Loss
from fedblend.data.federated import FederatedData
from fedblend.local import Work
from fedblend.metrics import standard
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import simulate
from fedblend.simulation.train_alone import train_alone

COHORT = 20
WORK: Any = {"steps": 10, "batch_size": 10}


class Method(NamedTuple):
    """What is run, and which of the models it yields a client uses."""

    run: str
    model: str


METHODS = {
    "local-only": Method("alone", "personal"),
    "FedAvg": Method("FedAvg", "shared"),
    "fine-tuned": Method("FedAvg", "personal"),
    "FLIX": Method("FLIX", "personal"),
    "APFL": Method("APFL", "personal"),
}


def _alone(loss: Loss) -> Algorithm:
    return local_only(loss, Work(0.3, **WORK))


def _fedavg(loss: Loss) -> Algorithm:
    return finetune(
        fedavg(loss, Work(1.0, **WORK)), loss, Work(0.3, steps=50, batch_size=10)
    )


def _flix(loss: Loss) -> Algorithm:
    own = solvers.lbfgs(losses.l2(loss, 1e-2), tolerance=1e-4, most=200)
    return flix(
        loss, lambda mixed: fedavg(mixed, Work(1.0, **WORK)), alpha=0.75, local=own
    )


def _apfl(loss: Loss) -> Algorithm:
    return apfl(loss, Work(0.3, **WORK), alpha=0.75, alpha_rate=0.001, held_out=0.2)


RUNS: dict[str, tuple[str, Callable[[Loss], Algorithm]]] = {
    "alone": ("Every client trains alone", _alone),
    "FedAvg": ("FedAvg trains a shared model, clients fine-tune it", _fedavg),
    "FLIX": ("FLIX mixes a shared model with the clients' own", _flix),
    "APFL": ("APFL learns both, and how to mix them", _apfl),
}
"""What is said while a run goes on, and its algorithm."""


def completed(name: str, splits: Sequence[FederatedData], rounds: int) -> Run:
    """A completed run of a method; a seed for each split, side by side."""
    model = models.build("softmax", (8, 8, 1), 10)
    loss = losses.cross_entropy(model.apply)
    start = train_alone if name == "alone" else simulate
    return start(
        RUNS[name][1](loss),
        model.init(jax.random.key(0)),
        splits,
        jax.random.split(jax.random.key(0), len(splits)),
        rounds=rounds,
        cohort=COHORT,
        measure=standard("classes", loss, model.apply),
        splits=["test"],
    ).complete()
