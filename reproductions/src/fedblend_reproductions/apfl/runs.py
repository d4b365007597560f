# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods compared alike: each tries the same rates, and the best rates run again.

A method that has two rates is tried at pairs of them, see ``Method.settings``.

Rates are tried with seed 0, side by side for the first ``tuning`` rounds, and judged by
the validation rows then. Those that are as good as the best are run again with other
seeds and to the end, and the one is reported whose validation rows are best there: what
wins late ties early. Seeds differ in the initial parameters, the cohorts and the
batches; who holds which rows is the same for all. Rates fall by 1 % a round.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.core import Loss
from fedblend_reproductions.cache import Cache

DECAY = 0.99
TIE = 0.001
"""Validation accuracies that differ by less count as equal."""


class Task(NamedTuple):
    """Data, a model, and how much is run on them; ``cohort`` None is all clients.

    A run is measured ``blocks`` times, and before it begins.
    """

    federated_data: fb.FederatedData
    model: fb.Model
    loss: Loss
    steps: int | fb.Epochs
    batch_size: int
    rounds: int
    cohort: int | None
    rates: tuple[float, ...]
    tuning: int
    seeds: int
    blocks: int = 10

    @property
    def work(self) -> dict[str, Any]:
        """Steps and batch size of a client's round."""
        return {"steps": self.steps, "batch_size": self.batch_size}

    def settings(self) -> dict[str, Any]:
        """All values that results depend on, for the cache."""
        numbers = self._asdict()
        for name in ("federated_data", "model", "loss"):
            del numbers[name]
        counts = {
            name: part.counts for name, part in self.federated_data.splits.items()
        }
        return {**numbers, "counts": counts}


Rate = float | tuple[float, ...]
"""What is tuned of a method: its rate, or all of them where it has several."""


class Method(NamedTuple):
    """A method: ``build(task, rate)``, and a label for each model it yields.

    ``settings(task)`` are the rates that are tried; those of the task if None. With
    ``alone``, all clients train in every round, whatever the cohort.
    """

    name: str
    build: Callable[[Task, Any], fb.Algorithm]
    labels: dict[str, str]
    settings: Callable[[Task], Sequence[Rate]] | None = None
    alone: bool = False

    def rates(self, task: Task) -> Sequence[Rate]:
        """The rates that are tried on a task."""
        return task.rates if self.settings is None else self.settings(task)


class Row(NamedTuple):
    """A model of a method over seeds, at the rate that was best on validation rows.

    ``curves[split][metric]`` are means over clients, [seeds, records], ``tried`` the
    validation accuracies of the rates, ``clients`` each client's test accuracy in the
    last round, [seeds, clients], and ``alphas`` its mixing weight, where there is one.
    """

    rate: Rate
    tried: dict[Rate, float]
    rounds: np.ndarray
    curves: dict[str, dict[str, np.ndarray]]
    clients: np.ndarray
    alphas: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """Test accuracy after the last round, by seed."""
        return self.curves["test"]["accuracy"][:, -1]

    @property
    def best(self) -> np.ndarray:
        """Test accuracy in the round with the best validation accuracy, by seed."""
        rounds = self.curves["validation"]["accuracy"].argmax(axis=1)
        return np.take_along_axis(
            self.curves["test"]["accuracy"], rounds[:, None], axis=1
        )[:, 0]

    def numbers(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            **self._asdict(),
            "test_accuracy_last": self.last,
            "test_accuracy_best_round": self.best,
        }


def decaying(rate: Any, decay: float = DECAY) -> fb.Scheduled:
    """Plain SGD whose rate falls every round."""
    return fb.Scheduled(lambda count: rate * decay**count, "round")


def compare(task: Task, methods: Sequence[Method], cache: Cache) -> dict[str, Row]:
    """A row for each label."""
    rows = {}
    for method in methods:
        rates = method.rates(task)
        tried = _tried(task, method, cache) if len(rates) > 1 else []
        for label, model in method.labels.items():
            grid = {
                rate: replica["curves"][model]["validation"]["accuracy"][-1]
                for rate, replica in zip(rates, tried, strict=False)
            }
            ends = [
                _row(rate, grid, _repeated(task, method, rate, cache), model)
                for rate in (as_good(grid) if grid else rates)
            ]
            rows[label] = max(ends, key=_at_the_end)
    return rows


def _tried(task: Task, method: Method, cache: Cache) -> list[dict[str, Any]]:
    """A shorter run at each of several rates; a single one needs no trial."""
    short, rates = task._replace(rounds=task.tuning), method.rates(task)
    return cache(
        f"{method.name} tried", lambda: run(short, method, rates, [0] * len(rates))
    )


def _repeated(task: Task, method: Method, rate: Rate, cache: Cache) -> list[Any]:
    """A whole run at one rate for each seed that is reported."""
    seeds = range(1, task.seeds + 1)
    return cache(
        f"{method.name} at {named(rate)}",
        lambda: run(task, method, [rate] * task.seeds, seeds),
    )


def named(rate: Rate) -> str:
    """A rate, or several of them, in words."""
    rates = rate if isinstance(rate, tuple) else (rate,)
    return " ".join(f"{one:g}" for one in rates)


def as_good(grid: Mapping[Rate, float | None]) -> list[Rate]:
    """The rates that are as good as the best, up to ``TIE``."""
    # A run that diverged has no accuracy, and is the worst.
    values = {rate: value or 0.0 for rate, value in grid.items()}
    return [rate for rate in values if values[rate] >= max(values.values()) - TIE]


def _at_the_end(row: Row) -> float:
    """Accuracy on validation rows in the last round; 0 if a seed diverged."""
    return float(np.nan_to_num(row.curves["validation"]["accuracy"][:, -1].mean()))


def _row(rate: Rate, grid: dict[Rate, float], replicas: list, model: str) -> Row:
    def stacked(split, metric):
        values = [replica["curves"][model][split][metric] for replica in replicas]
        return np.array(values, np.float64)

    return Row(
        rate,
        grid,
        np.array(replicas[0]["rounds"]),
        {
            split: {metric: stacked(split, metric) for metric in metrics}
            for split, metrics in replicas[0]["curves"][model].items()
        },
        np.array([replica["clients"][model] for replica in replicas], np.float64),
        np.array([replica["alphas"] for replica in replicas], np.float64),
    )


def run(
    task: Task, method: Method, rates: Sequence[Rate], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """A replica for each rate and seed."""
    completed = fb.simulate(
        lambda rate: method.build(task, rate),
        task.model.init,
        task.federated_data,
        jax.vmap(jax.random.key)(jnp.asarray(list(seeds))),
        rounds=task.rounds,
        cohort=None if method.alone else task.cohort,
        every=-(-task.rounds // task.blocks),
        measure={
            "accuracy": fb.metrics.accuracy(task.model.apply),
            "loss": fb.metrics.mean_loss(task.loss),
        },
        over=jnp.asarray(rates, jnp.float32),
    ).complete()
    models = set(method.labels.values())
    states = completed.client_states()
    alphas = np.asarray(getattr(states, "alpha", np.empty((0, len(rates)))))
    return [
        {
            "rate": rate,
            "seed": seed,
            "rounds": [record[replica].round for record in completed.records],
            "curves": {
                model: _curves([record[replica] for record in completed.records], model)
                for model in models
            },
            "clients": {
                model: completed.measured[replica]["test"][model]["accuracy"]
                for model in models
            },
            "alphas": alphas[:, replica],
        }
        for replica, (rate, seed) in enumerate(zip(rates, seeds, strict=True))
    ]


def _curves(records: list[Any], model: str) -> dict[str, Any]:
    return {
        split: {
            metric: [record.measures[split][model][metric].mean for record in records]
            for metric in records[0].measures[split][model]
        }
        for split in records[0].measures
    }
