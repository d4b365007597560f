# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds of a federation on ``models.tabular``, all splits of the rows in one program.

The rows of all clients lie in one array. A round is that of ``fedopt`` and ``partial``:
every client tells the gradient of one batch, the server takes a step of Adam with their
mean, and what is a client's own takes a plain step at the client.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedblend.models.feedforward import Affine, linear
from fedblend.models.tabular import hidden_features, tabular

EVERY = 10
"""Rounds after which held-out rows are predicted."""


class Batches(NamedTuple):
    """The rows of one split, ready for the program; padded to a common number."""

    inputs: Any
    targets: Any
    owner: Any
    """The client of each row."""
    weights: Any
    """Of the clients: their parts of all rows."""
    batches: Any
    """The numbers of the rows of each round, [rounds, clients, rows]."""
    held: Any
    """The inputs of the rows that are held out."""
    held_owner: Any


def draw_batches(counts: np.ndarray, size: int, rounds: int, seed: int) -> np.ndarray:
    """Rows of every round: those of a client in random order, again and again."""
    draw, ends = np.random.default_rng(seed), np.cumsum(counts)
    found = np.zeros((rounds, len(counts), size), np.int32)
    for client, (end, count) in enumerate(zip(ends, counts, strict=True)):
        if count:
            turns = -(-rounds * size // count)
            rows = [draw.permutation(count) for _ in range(turns)]
            rows = np.concatenate(rows)[: rounds * size].reshape(rounds, size)
            found[:, client] = end - count + rows
    return found


def _row_losses(kind: str, scores: jax.Array, targets: jax.Array) -> jax.Array:
    """What is trained on: the losses of ``fedblend.losses``."""
    if kind == "regression":
        return optax.l2_loss(scores[:, 0], targets)
    if kind == "counts":
        return jnp.exp(scores[:, 0]) - targets * scores[:, 0]
    if scores.shape[1] == 1:
        return optax.sigmoid_binary_cross_entropy(scores[:, 0], targets)
    whole = targets.astype(int)
    return optax.softmax_cross_entropy_with_integer_labels(scores, whole)


@lru_cache(maxsize=4)
def network_program(
    kind: str, inputs: int, ranks: int, outputs: int
) -> Callable[..., Any]:
    """From batches and rates to scores of held-out rows, [splits, kept, rows, ...]."""
    model = tabular(inputs, outputs, ranks=ranks)

    def scores(params, own: Any, rows, owner):
        features = hidden_features(params, rows, ranks)
        each = jnp.einsum("rf,rof->ro", features, own.weight[owner])
        return linear(params.last, features) + each + own.bias[owner]

    def train(key, of: Batches, rates):
        rate, level, head = rates
        optimizer = optax.adam(rate)
        params, clients = model.init(key), len(of.weights)
        own = jax.tree.map(lambda leaf: jnp.zeros((clients, *leaf.shape)), params.last)
        share = of.weights[:, None] / of.batches.shape[2]
        # What is a client's own is not the server's.
        shared = Affine(head == 0, (level == 0) & (head == 0))
        own_rates = Affine(head, level + head)

        def loss(both, rows):
            params, own = both
            found = scores(params, own, of.inputs[rows], of.owner[rows])
            losses = _row_losses(kind, found, of.targets[rows])
            return (share * losses.reshape(clients, -1)).sum()

        def step(state, rows):
            params, own, moments = state
            slope, slope_own = jax.grad(loss)((params, own), rows.ravel())
            last = jax.tree.map(jnp.multiply, slope.last, shared)
            updates, moments = optimizer.update(slope._replace(last=last), moments)
            # A client steps with the mean over its own rows.
            each = 1 / jnp.maximum(of.weights, 1e-9)
            own = jax.tree.map(
                lambda here, down, pace: (
                    here - pace * each.reshape(-1, *[1] * (down.ndim - 1)) * down
                ),
                own,
                slope_own,
                own_rates,
            )
            return (optax.apply_updates(params, updates), own, moments), None

        def block(state, rows):
            state, _ = jax.lax.scan(step, state, rows)
            return state, scores(*state[:2], of.held, of.held_owner)

        blocks = of.batches.reshape(-1, EVERY, *of.batches.shape[1:])
        return jax.lax.scan(block, (params, own, optimizer.init(params)), blocks)[1]

    return jax.jit(jax.vmap(train, (0, 0, None)))
