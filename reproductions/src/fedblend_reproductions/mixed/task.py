# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A task of Mixed FL, the algorithms and the baselines on it, and their curves.

Rates are those of the clients, thus the paper's times w_f: clients descend f_f here.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.core import Loss, PyTree
from fedblend.data.federated import Shards
from fedblend.metrics import Metric
from fedblend.transforms import central_loss

How = Literal["parallel", "one_way", "two_way"]
ALGORITHMS: tuple[How, ...] = ("parallel", "one_way", "two_way")
"""The paper's three algorithms."""


class Task(NamedTuple):
    """What all methods have in common.

    ``federated_data`` has the whole test set at every client, see ``with_test``, and
    where rates are tuned the validation rows too; ``held`` are the server's rows.
    ``cohort``, ``batch_size`` and ``steps`` are the clients'.
    """

    federated_data: fb.FederatedData
    held: PyTree
    model: fb.Model
    loss: Loss
    measures: Mapping[str, Metric]
    weights: tuple[float, float]
    cohort: int
    batch_size: int
    steps: int

    def central_batch(self, how: How) -> int:
        """The paper's rule: as many rows as the cohort sees, in a step or a round."""
        rows = self.cohort * self.batch_size
        return rows * self.steps if how == "one_way" else rows


class Method(NamedTuple):
    """A function from a rate to an algorithm, and on which data it runs."""

    build: Callable[[Any], fb.Algorithm]
    federated_data: fb.FederatedData
    cohort: int | None = None
    held: PyTree | None = None


class Curves(NamedTuple):
    """``values[metric][replicas, points]`` on held-out rows, after these rounds."""

    rounds: np.ndarray
    values: dict[str, np.ndarray]


def with_test(
    federated_data: fb.FederatedData, rows: PyTree, validation: PyTree | None = None
) -> fb.FederatedData:
    """The same clients, each with these held-out rows."""
    clients = federated_data.clients

    def same(rows):
        return Shards(rows, np.zeros(clients, int), np.full(clients, _count(rows)))

    return fb.FederatedData(
        federated_data.train,
        validation=None if validation is None else same(validation),
        test=same(rows),
    )


def on_part(metric: Metric, first: int, last: int) -> Metric:
    """A metric on some of the rows of a set that all clients share."""

    def measured(model, batch):
        return metric(model, jax.tree.map(lambda leaf: leaf[first:last], batch))

    return dataclasses.replace(metric, fn=measured, with_rows=None)


def mixed_fl(
    task: Task, how: How, *, central_batch: int | None = None, merge: str | None = None
) -> Method:
    """One of the three algorithms over FedAvg; the paper's central batch if None."""
    batch = central_batch or task.central_batch(how)
    work = {"steps": task.steps, "batch_size": task.batch_size}

    def build(rate):
        return fb.transforms.mixed_fl(
            fb.fedavg(task.loss, fb.Work(rate, **work)),
            central_loss.row_loss(task.loss, batch),
            how=how,
            weights=task.weights,
            steps=task.steps,
            merge=merge,
        )

    return Method(build, task.federated_data, task.cohort, task.held)


def clients_alone(task: Task) -> Method:
    """FedAvg at the paper's rate, without the server's rows."""
    work = {"steps": task.steps, "batch_size": task.batch_size}
    scale = 1 / task.weights[0]
    return Method(
        lambda rate: fb.fedavg(task.loss, fb.Work(scale * rate, **work)),
        task.federated_data,
        task.cohort,
    )


def central_alone(task: Task) -> Method:
    """As many steps on the server's rows alone."""
    weights = np.ones(_count(task.held))
    return _in_one_place(task, task.held, weights, task.central_batch("parallel"))


def oracle(task: Task) -> Method:
    """As many steps on all rows in one place, by the mixture's loss.

    Rows are drawn alike and count so that those of clients together weigh w_f.
    """
    train = task.federated_data.train
    sides = (train.examples, task.held)
    counts = [_count(rows) for rows in sides]
    rows = jax.tree.map(lambda *parts: np.concatenate(parts), *sides)
    weights = [
        np.full(count, weight * sum(counts) / count)
        for count, weight in zip(counts, task.weights, strict=True)
    ]
    batch = 2 * task.central_batch("parallel")
    return _in_one_place(task, rows, np.concatenate(weights), batch)


def _count(rows: PyTree) -> int:
    return len(jax.tree.leaves(rows)[0])


def _in_one_place(task: Task, rows: PyTree, weights: np.ndarray, batch: int) -> Method:
    """A single client with all these rows, each with a weight of its own."""

    def loss(params, weighed):
        rows, weights = weighed
        return weights * task.loss(params, rows)

    everyone = [np.arange(len(weights))]
    single = fb.federate((rows, np.float32(weights)), everyone)
    test, validation = task.federated_data.test, task.federated_data.validation
    assert test is not None
    scale = 1 / task.weights[0]

    def build(rate):
        return fb.fedavg(
            loss, fb.Work(scale * rate, steps=task.steps, batch_size=batch)
        )

    apart = None if validation is None else validation.examples
    return Method(build, with_test(single, test.examples, apart))


def simulated(
    task: Task,
    method: Method,
    rates: Sequence[float],
    seeds: Sequence[int],
    starts: PyTree | None = None,
    **options,
) -> fb.Run:
    """A replica for each pair of a rate and a seed, from its own model if given."""
    held = None if method.held is None else fb.shard_of(method.held)

    def build(replica):
        rate, params = replica
        algorithm = method.build(rate)
        if params is None:
            return algorithm
        return algorithm._replace(
            start=lambda _, *others: algorithm.start(params, *others)
        )

    return fb.simulate(
        build,
        task.model.init,
        method.federated_data,
        jax.vmap(jax.random.key)(jnp.asarray(list(seeds))),
        cohort=method.cohort,
        central=held,
        over=(jnp.asarray(rates, jnp.float32), starts),
        **options,
    )


def course(
    task: Task,
    method: Method,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    rounds: int,
    every: int,
    split: str = "test",
) -> Curves:
    """Curves on held-out rows, a replica for each pair of a rate and a seed."""
    run = measured(task, method, rates, seeds, rounds=rounds, every=every, split=split)
    return curves_of(run, task, split)


def measured(
    task: Task,
    method: Method,
    rates: Sequence[float],
    seeds: Sequence[int],
    *,
    split: str = "test",
    **options,
) -> fb.Run:
    """A finished run, measured during training on the rows that all clients share."""
    return simulated(
        task,
        method,
        rates,
        seeds,
        measure=task.measures,
        measure_on=[0],
        splits=(split,),
        **options,
    ).complete()


def curves_of(run: fb.Run, task: Task, split: str = "test") -> Curves:
    """What was measured in a finished run."""
    return Curves(
        np.array([record[0].round for record in run.records]),
        {
            name: np.array(
                [
                    [
                        one[replica].measures[split]["shared"][name].mean
                        for one in run.records
                    ]
                    for replica in range(run.replicas or 1)
                ]
            )
            for name in task.measures
        },
    )


def copies(task: Task) -> list[np.ndarray]:
    """Indices of the server's rows that each client gets, w_c / w_f times its own."""
    ratio = task.weights[1] / task.weights[0]
    held = len(jax.tree.leaves(task.held)[0])
    return [
        np.random.default_rng((0, client)).permutation(held)[: max(round(ratio * n), 1)]
        for client, n in enumerate(task.federated_data.train.counts)
    ]


def with_copies(task: Task) -> Method:
    """FedAvg at the paper's rate on own and copied rows, in batches larger by 1/w_f."""
    train = task.federated_data.train
    theirs = copies(task)
    picked, sizes = np.concatenate(theirs), [len(one) for one in theirs]
    rows = jax.tree.map(
        lambda mine, held: np.concatenate([mine, np.asarray(held)[picked]]),
        train.examples,
        task.held,
    )
    places = train.total + np.arange(len(picked))
    own = [
        np.arange(start, start + count)
        for start, count in zip(train.starts, train.counts, strict=True)
    ]
    everyone = [
        np.concatenate([mine, copied])
        for mine, copied in zip(
            own, np.split(places, np.cumsum(sizes)[:-1]), strict=True
        )
    ]
    test, validation = task.federated_data.test, task.federated_data.validation
    assert test is not None
    federated_data = with_test(
        fb.federate(rows, everyone),
        test.examples,
        None if validation is None else validation.examples,
    )
    scale, batch = 1 / task.weights[0], round(task.batch_size / task.weights[0])
    return Method(
        lambda rate: fb.fedavg(
            task.loss, fb.Work(scale * rate, steps=task.steps, batch_size=batch)
        ),
        federated_data,
        task.cohort,
    )


def copied_bytes(task: Task) -> float:
    """Bytes of characters that a client gets, in the mean: a window and its end."""
    length = task.held[0].shape[1]
    return float(np.mean([len(rows) for rows in copies(task)])) * (length + 1)


def added_bytes(task: Task, method: Method) -> dict[str, float]:
    """Bytes that each message, down and up, has beyond that of FedAvg."""

    def sizes(method):
        run = simulated(task, method, [1.0], [0], rounds=1)
        return run.message_bits

    ours, plain = sizes(method), sizes(clients_alone(task))
    return {"down": (ours.down - plain.down) / 8, "up": (ours.up - plain.up) / 8}
