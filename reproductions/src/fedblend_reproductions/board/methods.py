# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of the board: one short entry for each method.

``Method("apfl", {"alpha": 0.5})`` is ``fb.apfl(loss, work, alpha=0.5)``. What needs
more has a ``build`` of its own, which takes the same loss and work and the options.
Options are plain numbers and words: they are part of a cell's hash.

Every method is tuned over the rates of its task and nothing else; its own options are
those of its paper or, where the paper tunes them, a common default.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

import fedblend as fb
from fedblend.core import Algorithm, Loss
from fedblend.local import Epochs, Work, descend
from fedblend.losses import gradient
from fedblend.models.model import Model
from fedblend.solvers import Solver
from fedblend_reproductions.feddbe import feddbe, shifted

Build = Callable[..., Algorithm]
"""``build(loss, work, **options)``; ``work`` is one epoch at the rate that is tried."""


class Method(NamedTuple):
    """A row of the board.

    Attributes:
        name: of the row, and of the builder in ``fedblend`` unless ``build`` is given.
        options: of the builder.
        build: makes the algorithm.
        published: the method's name in the published tables.
        personal: whether clients deploy models of their own.
        models: number of shared models; of an ensemble if more than 1.
        shifted: whether clients shift the features of the model.
        title: in the table; the published name, or the name, if empty.
    """

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012
    build: Build | None = None
    published: str = ""
    personal: bool = True
    title: str = ""
    models: int = 1
    shifted: bool = False

    @property
    def heading(self) -> str:
        """The words of the row."""
        return self.title or self.published or self.name

    def form(self, model: Model, shape: tuple[int, ...]) -> Model:
        """The model that the method trains, of a task's model and its inputs' shape."""
        if self.shifted:
            return shifted(model, shape)
        return fb.models.ensemble(model, self.models) if self.models > 1 else model

    def algorithm(self, loss: Loss, work: Work, model: Model) -> Algorithm:
        """The algorithm of the row, on the loss of a model of its form."""
        build = self.build or getattr(fb.algorithms, self.name)
        more = {"features": model.features} if self.shifted else {}
        return build(loss, work, **self.options, **more)


def trained_alone(loss: Loss, work: Work, epochs: int) -> Solver:
    """FLIX's pure local models: so many epochs on the client's own rows."""

    def solve(params, shard, key):
        more = work._replace(steps=Epochs(epochs))
        return descend(gradient(loss), params, shard, key, work=more)[0], jnp.zeros(())

    return solve


def _finetune(loss: Loss, work: Work, epochs: int) -> Algorithm:
    return fb.finetune(fb.fedavg(loss, work), loss, work._replace(steps=Epochs(epochs)))


def _ditto(loss: Loss, work: Work, lam: float) -> Algorithm:
    return fb.ditto(fb.fedavg(loss, work), loss, work, lam=lam)


def _fedrep(loss: Loss, work: Work, head_epochs: int) -> Algorithm:
    return fb.algorithms.fedrep(loss, work, head=HEAD, head_steps=Epochs(head_epochs))


def _fedbabu(loss: Loss, work: Work, head: list[str], epochs: int) -> Algorithm:
    return fb.algorithms.fedbabu(loss, work, head=head, tuning_steps=Epochs(epochs))


def _flix_local_steps(loss: Loss, work: Work, alpha: float, epochs: int) -> Algorithm:
    alone = trained_alone(loss, work, epochs)
    return fb.flix(loss, lambda of: fb.fedavg(of, work), alpha=alpha, local=alone)


def _flix(loss: Loss, work: Work, alpha: float, epochs: int, rows: int) -> Algorithm:
    alone = trained_alone(loss, work, epochs)
    step = Work(work.optimizer, 1, rows)
    return fb.flix(loss, lambda of: fb.fedavg(of, step), alpha=alpha, local=alone)


def _perfedavg(loss: Loss, work: Work) -> Algorithm:
    rate: Any = work.optimizer
    return fb.algorithms.perfedavg(loss, work, inner_rate=rate, hessian="none")


def _pfedme(loss: Loss, work: Work, lam: float, inner_steps: int) -> Algorithm:
    rate: Any = work.optimizer
    more = {"lam": lam, "inner_rate": rate, "inner_steps": inner_steps}
    return fb.algorithms.pfedme(loss, work, **more)


def _with_server(name: str) -> Build:
    def build(loss: Loss, work: Work, server_rate: float) -> Algorithm:
        return getattr(fb.algorithms, name)(loss, work, server_rate)

    return build


def _scafflix(
    loss: Loss, work: Work, alpha: float, epochs: int, steps: int
) -> Algorithm:
    alone = trained_alone(loss, work, epochs)
    many = work._replace(steps=steps)
    return fb.scafflix(loss, many, alpha=alpha, personal=alone)


def _l2gd(loss: Loss, work: Work, lam: float, steps: int) -> Algorithm:
    rate: Any = work.optimizer
    return fb.algorithms.l2gd(
        loss, rate, lam=lam, p=1 / steps, batch_size=work.batch_size
    )


HEAD = ["last"]
BODY = ["first", "second", "hidden"]
"""The network's layers: the head gives the scores."""
FINE_TUNED = "FedAvg, fine-tuned"

METHODS = {
    method.name: method
    for method in (
        Method("fedavg", published="FedAvg", personal=False),
        Method("local_only", published="Local", title="local only"),
        Method("finetune", {"epochs": 1}, _finetune, "FedAvg+", title=FINE_TUNED),
        Method("apfl", {"alpha": 0.5}, published="APFL"),
        Method("ditto", {"lam": 0.1}, _ditto, "Ditto"),
        Method("fedrep", {"head_epochs": 1}, _fedrep, "FedRep"),
        Method(
            "flix_local_steps",
            {"alpha": 0.5, "epochs": 10},
            _flix_local_steps,
            title="FLIX, local steps",
        ),
        Method("fedper", {"head": HEAD}, published="FedPer"),
        Method("fedala", {"head": HEAD}, published="FedALA"),
        Method("feddbe", {"kappa": 50.0}, feddbe, published="FedDBE", shifted=True),
        Method("fedbabu", {"head": HEAD, "epochs": 1}, _fedbabu, "FedBABU"),
        Method("perfedavg", {}, _perfedavg, "Per-FedAvg"),
        Method("pfedme", {"lam": 15.0, "inner_steps": 5}, _pfedme, "pFedMe"),
        Method("fedprox", {"mu": 0.001}, published="FedProx", personal=False),
        Method("scaffold", title="SCAFFOLD", personal=False),
        Method("flix", {"alpha": 0.5, "epochs": 10, "rows": 100}, _flix, title="FLIX"),
        Method("fedem", published="FedEM", models=3),
        Method("hypcluster", title="HypCluster", models=3),
        Method(
            "scafflix",
            {"alpha": 0.5, "epochs": 10, "steps": 262},
            _scafflix,
            title="Scafflix",
        ),
        Method("lg_fedavg", {"body": BODY}, title="LG-FedAvg"),
        Method("l2gd", {"lam": 0.1, "steps": 262}, _l2gd, title="L2GD"),
        Method(
            "reptile", {"server_rate": 0.5}, _with_server("reptile"), title="Reptile"
        ),
        Method("fomaml", {"server_rate": 0.1}, _with_server("fomaml"), title="FOMAML"),
        Method("mapper", {"grid": 3}, title="MAPPER"),
    )
}
"""In the order in which they are run: the most important first."""

BASELINE = "finetune"
"""The row that every personal method has to beat."""
