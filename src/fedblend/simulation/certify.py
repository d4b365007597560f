# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates of a run in progress, and stopping at one.

f~ is the mean over all clients of the loss, on their training rows, of the models that
they deploy. Its gradient in the shared model is autodiff's, through ``personal``: that
of FLIX mixes, that of a method with one model for all is the shared one. Here that is a
measurement: nothing travels, and no bit is counted.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import mixing
from fedblend.batches import everything
from fedblend.checks import POSITIVE
from fedblend.core import Down, Key, Loss, PyTree, Shard
from fedblend.data.federated import Shards
from fedblend.losses import objective
from fedblend.simulation.compile import ReplicaProgram
from fedblend.simulation.evaluate import personal
from fedblend.simulation.rounds import Members, Settings, shard_of
from fedblend.simulation.run import Run
from fedblend.theory.bounds import Certificate, certify
from fedblend.trees import sum_squares


def objective_of_all(
    loss: Loss,
    settings: Settings,
    hyper: Any,
    root: Key,
    down: Down,
    states: PyTree,
    examples: PyTree,
    members: Members,
) -> tuple[jax.Array, jax.Array]:
    """f~ of all members in one replica, and the squared norm of its gradient."""

    def one(client):
        state, member = client
        shard = shard_of(settings, examples, member)

        def value(shared):
            told = down._replace(shared=shared)
            model = personal(settings, hyper, root, told, state, shard)
            return objective(loss, model, everything(shard))

        return jax.value_and_grad(value)(down.shared)

    found = jax.lax.map(one, (states, members), batch_size=settings.chunk)
    shares = members.weights / members.weights.sum()
    value, gradient = jax.tree.map(
        lambda leaf: jnp.tensordot(shares.astype(leaf.dtype), leaf, axes=1), found
    )
    return value, sum_squares(gradient)


def certificates(
    run: Run, loss: Loss, mu: float | Sequence[float]
) -> list[Certificate]:
    """What is proven of the shared model of each replica, as it is now.

    Args:
        run: a run; one that has not begun is completed first.
        loss: what clients minimize, one number for every row, penalties included; the
            same in every call.
        mu: the strong convexity of f~, one number or one for each replica.

    >>> import numpy as np
    >>> import fedblend as fb
    >>> rows = (np.eye(2), np.array([3.0, 5.0]))
    >>> loss = fb.losses.squared_error(lambda x, inputs: inputs @ x)
    >>> algorithm = fb.fedavg(loss, fb.Work(0.5, 1, None))
    >>> data = fb.federate(rows, [np.arange(2)])
    >>> run = fb.simulate(algorithm, jnp.zeros(2), data, jax.random.key(0), rounds=200)
    >>> [found] = certificates(run, loss, mu=0.5)
    >>> found.gap < 1e-9
    True
    """
    run = run if run.down is not None else run.complete()
    engine, clients = run._engine, run._clients
    states, members, examples, _ = clients.load_measured(np.arange(clients.number))
    axes = (0, 1, None, engine.placed)
    program = ReplicaProgram("objective", partial(objective_of_all, loss), axes, 0)
    found = engine.programs.call(
        program, (run.down, states, examples["train"], members)
    )
    values, squares = (np.reshape(leaf, -1).astype(float) for leaf in found)
    each = np.broadcast_to(np.asarray(mu, float), values.shape)
    return [
        certify(value, norm, one)
        for value, norm, one in zip(
            values.tolist(), np.sqrt(squares).tolist(), each.tolist(), strict=True
        )
    ]


def mixture_gap(
    loss: Loss, train: Shards, models: PyTree
) -> Callable[[jax.Array, PyTree], jax.Array]:
    """From alpha_i and a shared model to ``f~(shared) - mean f_i(x_i)``.

    Args:
        loss: one number for every row.
        train: the clients' training rows.
        models: x_i, stacked over clients.
    """
    numbers = (np.arange(len(train.starts)), train.starts, train.counts)
    places = tuple(jnp.asarray(number, jnp.int32) for number in numbers)

    @jax.jit
    def gap(alpha: jax.Array, shared: PyTree) -> jax.Array:
        def client_gap(client):
            weight, own, (id, start, count) = client
            batch = everything(Shard(train.examples, start, count, id, train.capacity))
            mixture = mixing.parameters(weight, shared, own)
            return objective(loss, mixture, batch) - objective(loss, own, batch)

        return jax.lax.map(client_gap, (alpha, models, places)).mean()

    return gap


def until(
    run: Run, eps: float, loss: Loss, mu: float | Sequence[float]
) -> Iterator[Any]:
    """Loop over a run, to the first record at which every replica is certified.

    Goes on from where the run is; the last record is at ``run.rounds`` at the latest.

    Args:
        run: a run.
        eps: the accuracy, ``f~ - min f~``.
        loss: see ``certificates``.
        mu: see ``certificates``.
    """
    POSITIVE("eps", eps)

    def is_certified() -> bool:
        return all(one.gap <= eps for one in certificates(run, loss, mu))

    if run.down is not None and is_certified():
        return
    for record in run:
        yield record
        if is_certified():
            return
