# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX with full gradients on w6a: a round beside NumPy's products, DIANA, a sweep.

A round of gradient descent needs two products for every client, its rows with the
mixture and their transpose with the residuals; NumPy does just these, once for each
client and once for all rows together. Needs w6a in $FEDBLEND_DATA, and prints JSON.
"""

import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.compress import rand_k
from fedblend.theory import constants
from fedblend.transforms import diana

CLIENTS, L2, K, BLOCK, BLOCKS = 50, 0.1, 15, 100, 7
ALPHAS = np.arange(1, 11) / 10


def problem():
    data = fb.datasets.load("w6a")
    parts = fb.partition.contiguous(len(data.rows[1]), CLIENTS)
    federated_data = fb.federate(data.rows, parts)
    model = fb.models.logistic(data.rows[0].shape[1], intercept=False)
    loss = fb.losses.l2(fb.losses.logistic(model.apply), L2)
    return federated_data, model, loss, constants.logistic(federated_data, L2).smooth


def algorithms(federated_data, model, loss, smooth):
    """Builders from alpha: gradient descent, and DIANA with rand-k."""
    first = model.init(jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros((CLIENTS, *leaf.shape)), first)
    omega = federated_data.train.examples[0].shape[1] / K - 1

    def flix(alpha, bound):
        step = 1 / (alpha**2 * bound)
        return fb.flix(
            loss,
            lambda mixed: fb.fedavg(mixed, fb.Work(step, steps=1, batch_size=None)),
            alpha=alpha,
            local=fb.solvers.given(zeros),
            smooth=smooth,
        )

    def compressed(alpha):
        bound = smooth.mean() + 6 * smooth.max() * omega / CLIENTS
        return diana(flix(alpha, bound), rand_k(K))

    return (lambda alpha: flix(alpha, smooth.mean())), compressed


def products(train):
    """The two products of every client, and of all rows at once, as functions."""
    inputs = np.ascontiguousarray(train.examples[0])
    point = np.full(inputs.shape[1], 0.1, np.float32)
    slopes = np.full(len(inputs), 0.1, np.float32)
    own = [
        (inputs[start : start + count], slopes[start : start + count])
        for start, count in zip(train.starts, train.counts, strict=True)
    ]

    def by_client():
        for rows, slope in own:
            np.matmul(rows, point)
            np.matmul(rows.T, slope)

    def all_at_once():
        np.matmul(inputs, point)
        np.matmul(inputs.T, slopes)

    return by_client, all_at_once


def seconds_of(work, times):
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begun) / times


def blocks_of(algorithm, federated_data, model, rounds, over=None):
    """A function that computes the next ``rounds`` rounds; the first are computed."""
    run = fb.simulate(
        algorithm,
        model.init,
        federated_data,
        jax.random.key(0),
        rounds=10**9,
        every=rounds,
        over=over,
    )
    records = iter(run)
    next(records)
    next(records)
    return lambda: next(records)


def main():
    federated_data, model, loss, smooth = problem()
    descent, compressed = algorithms(federated_data, model, loss, smooth)
    by_client, all_at_once = products(federated_data.train)
    once = blocks_of(descent(0.5), federated_data, model, BLOCK)
    ten = blocks_of(descent, federated_data, model, BLOCK, jnp.asarray(ALPHAS))
    squeezed = blocks_of(compressed(0.5), federated_data, model, 1000)
    taken = {"round": [], "products": [], "products_at_once": [], "ten": []}
    for _ in range(BLOCKS):  # taking turns, so that all see the same machine
        taken["products"].append(seconds_of(by_client, BLOCK))
        taken["round"].append(seconds_of(once, 1) / BLOCK)
        taken["products_at_once"].append(seconds_of(all_at_once, BLOCK))
        taken["ten"].append(seconds_of(ten, 1) / BLOCK)
    least = {name: min(values) for name, values in taken.items()}
    middle = {name: statistics.median(values) for name, values in taken.items()}
    diana_seconds = [seconds_of(squeezed, 1) for _ in range(3)]
    answer = {
        "milliseconds": {name: 1e3 * value for name, value in least.items()},
        "round / NumPy's products by client": least["round"] / least["products"],
        "the same by medians": middle["round"] / middle["products"],
        "round / products of all rows": least["round"] / least["products_at_once"],
        "ten alphas / one": least["ten"] / least["round"],
        "seconds of 1000 rounds of DIANA": min(diana_seconds),
    }
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
