# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The runs of the language story: every method, on the same splits and steps.

A run's result are the losses of all test windows, [splits, clients, windows], in nats
by token: methods are compared by what they say of the same windows.
"""

import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import fedblend as fb
from fedblend_reproductions.adapters.language_task import Task
from fedblend_reproductions.cache import Cache

Result = dict[str, Any]
"""``test``: the losses; ``validation``: their mean on validation windows; ``bits`` that
one client sends and receives in a round; ``seconds``."""


def measured(run: fb.Run, begun: float, model: str = "personal") -> Result:
    """The result of a run, by the losses of one of its models."""
    run.complete()
    test = [rows["test"][model]["loss"] for rows in run.by_row]
    means = [values["validation"][model]["loss"] for values in run.measured]
    sizes = run.message_bits
    return {
        "test": test,
        "validation": float(np.mean(means)),
        "bits": [int(sizes.up), int(sizes.down)],
        "seconds": time.perf_counter() - begun,
    }


class Methods:
    """Every method on a task; each is computed once.

    Args:
        task: the clients and the base.
        cache: of results.
    """

    def __init__(self, task: Task, cache: Cache):
        self.task, self.cache = task, cache
        self.rank = task.plan.rank
        self._alone: fb.Run | None = None

    def _loss(self, model: fb.Model) -> Any:
        return fb.losses.sequence_cross_entropy(model.apply)

    def _simulate(
        self, algorithm: Any, params: Any, model: fb.Model, rounds: int | None = None, **more
    ) -> fb.Run:
        """A run on all splits side by side, measured at its end."""
        plan = self.task.plan
        rounds = plan.rounds if rounds is None else rounds
        given = {
            "federated_data": list(self.task.splits),
            "key": self.task.keys(plan.splits),
        }
        return fb.simulate(
            algorithm,
            params,
            **(given | more),
            rounds=rounds,
            every=max(rounds, 1),
            measure={"loss": fb.metrics.mean_loss(self._loss(model))},
            splits=["validation", "test"],
        )

    def base(self) -> Result:
        """The base as it is: nobody trains."""

        def compute():
            begun, model = time.perf_counter(), self.task.model
            fixed = fb.fedavg(self._loss(model), self.task.plan.work(1e-3))
            run = self._simulate(fixed, self.task.base, model, 0)
            return measured(run, begun, "shared")

        return self.cache("base", compute)

    def best_rate(self, what: str, rank: int | None = None) -> float:
        """Of the rates of a side, that with the least loss on validation windows."""
        plan = self.task.plan
        rates = plan.full_rates if what == "full" else plan.adapter_rates
        found = self.rates(what, rank)
        return rates[int(np.argmin(found))]

    def rates(self, what: str, rank: int | None = None) -> list[float]:
        """The losses on the first split's validation windows, by rate."""
        plan = self.task.plan
        rank = self.rank if rank is None else rank
        name = "rates full" if what == "full" else f"rates rank {rank}"
        rates = plan.full_rates if what == "full" else plan.adapter_rates

        def compute():
            model, params = self._side(what, rank)
            run = self._simulate(
                lambda rate: fb.fedavg(self._loss(model), plan.work(rate)),
                params,
                model,
                federated_data=self.task.splits[0],
                key=self.task.keys(1)[0],
                over=jnp.array(rates),
            ).complete()
            return [float(np.mean(v["validation"]["shared"]["loss"])) for v in run.measured]

        return self.cache(name, compute)

    def _side(self, what: str, rank: int) -> tuple[fb.Model, Any]:
        """The model and the start of full fine-tuning, or of adapters."""
        if what == "full":
            return self.task.model, self.task.base
        model = self.task.adapted(rank)
        return model, model.init

    def shared(self, what: str, rank: int | None = None) -> Result:
        """FedAvg: on all weights ("full"), or on adapters ("adapters")."""
        rank = self.rank if rank is None else rank
        rate = self.best_rate(what, rank)
        name = "shared full" if what == "full" else f"shared rank {rank}"

        def compute():
            begun = time.perf_counter()
            model, params = self._side(what, rank)
            own = fb.fedavg(self._loss(model), self.task.plan.work(rate))
            return measured(self._simulate(own, params, model), begun, "shared")

        return self.cache(name, compute)
