# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A baseline: some of the server's rows are copied to each client, once.

Clients then descend the mixture by themselves, with plain FedAvg. What that costs is
counted as bytes: those of the copies, against what each of the ways adds to messages.
"""

import jax
import numpy as np

import fedblend as fb
from fedblend_reproductions.mixed.task import (
    Method,
    Task,
    clients_alone,
    simulated,
    with_test,
)


def copies(task: Task) -> list[np.ndarray]:
    """Numbers of the server's rows that each client gets, w_c / w_f times its own."""
    ratio = task.weights[1] / task.weights[0]
    held = len(jax.tree.leaves(task.held)[0])
    return [
        np.random.default_rng((0, client)).permutation(held)[: max(round(ratio * n), 1)]
        for client, n in enumerate(task.federated_data.train.counts)
    ]


def with_copies(task: Task) -> Method:
    """FedAvg at the paper's rate on own and copied rows, in batches larger by 1/w_f."""
    train = task.federated_data.train
    rows = jax.tree.map(lambda *sides: np.concatenate(sides), train.examples, task.held)
    own = [
        np.arange(start, start + count)
        for start, count in zip(train.starts, train.counts, strict=True)
    ]
    everyone = [
        np.concatenate([mine, train.total + theirs])
        for mine, theirs in zip(own, copies(task), strict=True)
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
    """What each message, down and up, has more than that of FedAvg, as counted."""

    def sizes(method):
        run = simulated(task, method, [1.0], [0], rounds=1)
        return run.message_bits

    ours, plain = sizes(method), sizes(clients_alone(task))
    return {"down": (ours.down - plain.down) / 8, "up": (ours.up - plain.up) / 8}
