# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every method on one frozen base, with the same splits, rounds and steps.

A result has what the metric says of all test rows, [splits, clients, rows]: methods are
compared by the same rows.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend_reproductions.adapters.task import Task
from fedblend_reproductions.cache import Cache

Result = dict[str, Any]
"""``test``: the metric by rows; ``bits`` that a client sends and receives in a round;
``seconds``."""
FULL, ADAPTERS = "full", "adapters"
"""What is trained: all weights, or adapters."""


class Runs:
    """Every method on a task; each is computed once.

    Args:
        task: the clients and the base.
        cache: of results.
    """

    def __init__(self, task: Task, cache: Cache):
        self.task, self.plan, self.cache = task, task.plan, cache

    def base(self) -> Result:
        """The base as it is: nobody trains."""
        model = self.task.model
        idle = fb.fedavg(self._loss(model), self.plan.work(1e-3))
        return self._result(
            "base",
            lambda: self._simulate(idle, self.task.base, model, rounds=0),
            "shared",
        )

    def rates(self, what: str, rank: int) -> list[float]:
        """The mean loss on the first split's validation rows, by rate."""

        def compute():
            model, params = self._side(what, rank)
            run = self._simulate(
                lambda rate: fb.fedavg(self._loss(model), self.plan.work(rate)),
                params,
                model,
                federated_data=self.task.splits[0],
                key=self.task.keys[0],
                over=jnp.array(self._tried(what)),
            )
            run.complete()
            found = [of["validation"]["shared"]["loss"] for of in run.measured]
            return np.mean(found, axis=1)

        return self.cache(f"rates of {_named(what, rank)}", compute)

    def best_rate(self, what: str, rank: int) -> float:
        """The rate with the least such loss."""
        return self._tried(what)[int(np.argmin(self.rates(what, rank)))]

    def shared(self, what: str, rank: int) -> Result:
        """FedAvg: one model, or one adapter, for all clients."""
        rate = self.best_rate(what, rank)

        def run():
            model, params = self._side(what, rank)
            own = fb.fedavg(self._loss(model), self.plan.work(rate))
            return self._simulate(own, params, model)

        return self._result(f"shared {_named(what, rank)}", run, "shared")

    def budget_alone(self) -> tuple[float, int]:
        """The rate and the rounds with which clients train alone.

        Of all that are tried, the pair that is best for the first split's validation
        rows. Rounds go up to those of ``Plan.rounds_alone``.
        """

        def compute():
            model = self.task.adapted(self.plan.rank)
            run = self._simulate(
                lambda rate: fb.local_only(self._loss(model), self.plan.work(rate)),
                model.init,
                model,
                rounds=self.plan.rounds_alone,
                every=1,
                federated_data=self.task.splits[0],
                key=self.task.keys[0],
                over=jnp.array(self.plan.alone_rates),
                splits=["validation"],
            )
            run.complete()
            return [
                [
                    record.measures["validation"]["personal"]["loss"].mean
                    for record in run.history(replica)
                ]
                for replica in range(len(self.plan.alone_rates))
            ]

        losses = np.array(self.cache("rounds alone", compute))
        place, rounds = np.unravel_index(np.argmin(losses), losses.shape)
        return self.plan.alone_rates[place], int(rounds)

    def alone_and_flix(self) -> tuple[Result, Result]:
        """An adapter of each client alone, and FLIX's mixture with it."""
        model, work = self._adapters()
        rate, rounds = self.budget_alone()
        run: list[fb.Run] = []

        def alone():
            if not run:
                own = fb.local_only(self._loss(model), self.plan.work(rate))
                run.append(self._simulate(own, model.init, model, rounds=rounds))
            return run[0].complete()

        def flix():
            clients = range(self.task.splits[0].clients)
            own = alone().personal_models(clients)
            # [splits, clients, ...]: each split mixes with its own.
            over = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *own)
            return self._simulate(
                lambda models: fb.flix(
                    self._loss(model),
                    lambda loss: fb.fedavg(loss, work),
                    alpha=self.plan.alpha,
                    local=fb.solvers.given(models),
                    mix=fb.mixing.products,
                ),
                model.init,
                model,
                over=over,
            )

        return self._result("alone", alone), self._result("FLIX", flix)

    def apfl(self) -> Result:
        """APFL: a mixture of the shared and an own adapter, and its weight.

        Both have one rate: that of training alone, since the larger one of the shared
        adapter is too large for the rows of one client.
        """
        model, own = self._adapters()[0], self._own_work()
        method = fb.apfl(
            self._loss(model), own, alpha=self.plan.alpha, mix=fb.mixing.products
        )
        return self._result("APFL", lambda: self._simulate(method, model.init, model))

    def ditto(self) -> Result:
        """Ditto: an own adapter that is held near the shared one."""
        (model, work), own = self._adapters(), self._own_work()
        loss = self._loss(model)
        method = fb.ditto(fb.fedavg(loss, work), loss, own, lam=self.plan.lam)
        return self._result("Ditto", lambda: self._simulate(method, model.init, model))

    def fedalt(self) -> Result:
        """FedAlt: the sum of a shared and an own adapter, trained in turn."""
        (model, work), half = self._adapters(), max(self.plan.steps // 2, 1)
        both = fb.adapt.two_adapters(model)
        method = fb.algorithms.fedalt(
            self._loss(both),
            work._replace(steps=half),
            personal=["personal"],
            personal_steps=half,
            personal_rate=self._own_work().optimizer,
        )
        return self._result("FedAlt", lambda: self._simulate(method, both.init, both))

    def _own_work(self) -> fb.Work:
        """The work on what one client has alone."""
        return self.plan.work(self.budget_alone()[0])

    def _adapters(self) -> tuple[fb.Model, fb.Work]:
        """The model with adapters, and the work with their best rate."""
        rank = self.plan.rank
        return self.task.adapted(rank), self.plan.work(self.best_rate(ADAPTERS, rank))

    def _side(self, what: str, rank: int) -> tuple[fb.Model, Any]:
        """The model, and where its training starts."""
        if what == FULL:
            return self.task.model, self.task.base
        model = self.task.adapted(rank)
        return model, model.init

    def _tried(self, what: str) -> tuple[float, ...]:
        return self.plan.full_rates if what == FULL else self.plan.adapter_rates

    def _simulate(
        self,
        algorithm: Any,
        params: Any,
        model: fb.Model,
        rounds: int | None = None,
        **settings: Any,
    ) -> fb.Run:
        """A run on all splits side by side, by default measured at its end."""
        rounds = self.plan.rounds if rounds is None else rounds
        usual = {
            "federated_data": list(self.task.splits),
            "key": self.task.keys,
            "every": max(rounds, 1),
            "splits": ["validation", "test"],
        }
        return fb.simulate(
            algorithm,
            params,
            **(usual | settings),
            rounds=rounds,
            measure=self.task.metrics(model.apply),
        )

    def _loss(self, model: fb.Model) -> Any:
        return self.task.loss(model.apply)

    def _result(
        self, name: str, run: Callable[[], fb.Run], model: str = "personal"
    ) -> Result:
        """The result of a run, by one of its models."""

        def compute():
            begun, metric = time.perf_counter(), self.task.metric
            done = run().complete()
            return {
                "test": [of["test"][model][metric] for of in done.evidence.by_row],
                "bits": [done.message_bits.up, done.message_bits.down],
                "seconds": time.perf_counter() - begun,
            }

        return self.cache(name, compute)


def _named(what: str, rank: int) -> str:
    return "all weights" if what == FULL else f"adapters of rank {rank}"
