# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The local steps of APFL, and averages of models over them.

Variables w, v and alpha move together, each by its own optimizer.

A step takes the gradients of all three at the old w, v and alpha. In the paper they are
taken on one batch. With ``fresh`` v has a batch of its own, and ``Learning`` may hold
out rows for alpha.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import mixing, trees
from fedblend.algorithms.apfl_alpha import Learning
from fedblend.core import Batch, Down, Key, PyTree, Shard
from fedblend.local import Work, descend, planned, resolve


class Variables(NamedTuple):
    """What client i descends in its local steps: w_i, v_i and alpha_i."""

    shared: PyTree
    personal: PyTree
    alpha: PyTree


Gradients = Callable[[Variables, Batch], Variables]
"""``gradients(variables, batch)``: those of all three variables, on one batch."""


def local_steps(
    gradients: Gradients,
    variables: Variables,
    down: Down,
    shard: Shard,
    key: Key,
    *,
    work: Work,
    learning: Learning,
    fresh: bool = False,
) -> tuple[Variables, Variables, Shard]:
    """Take the local steps of a round.

    Args:
        gradients: of the three variables.
        variables: where to start.
        down: the server's message.
        shard: the client's rows.
        key: randomness of the batches.
        work: local work; w and v each have an optimizer of this kind.
        learning: how alpha is learned.
        fresh: whether v (and alpha) have another batch than w.

    Returns:
        The variables reached, the mean gradients on the way, and the rows that w and v
        were trained on.
    """
    train, held = learning.split(shard, down.round)
    steps, _ = planned(train, work)
    rule = resolve(work.optimizer, down.round, steps)
    of_alpha = learning.optimizer(work.optimizer, down.round, steps, held)
    rules = optax.partition(
        {"w": rule, "v": rule, "alpha": of_alpha}, Variables("w", "v", "alpha")
    )
    further: list[str | tuple[str, Shard]] = ["fresh batch"] if fresh else []
    further += [] if held is None else [("held-out batch", held)]

    def direction(here: Variables, batch: Batch, *others: Batch) -> Variables:
        of_w = gradients(here, batch)
        of_v = gradients(here, others[0]) if fresh else of_w
        of_alpha = of_v if held is None else gradients(here, others[-1])
        return Variables(of_w.shared, of_v.personal, of_alpha.alpha)

    reached, mean_gradients = descend(
        direction,
        variables,
        train,
        key,
        work=work._replace(optimizer=rules),
        round=down.round,
        correction=Variables(down.correction, None, None),
        further=further,
    )
    return reached, mean_gradients, train


class Average(NamedTuple):
    """The average of a model over steps, and the sum of the weights of these steps."""

    model: PyTree
    weight: jax.Array


def extended(past: Average, model: PyTree, weight: jax.Array) -> Average:
    """The average over more steps.

    Args:
        past: the average so far.
        model: the average over the steps since.
        weight: the sum of all weights, ``past.weight`` included.
    """
    old = past.weight / jnp.where(weight > 0, weight, 1)
    return Average(mixing.parameters(old, past.model, model), weight)


def averaging(
    rule: optax.GradientTransformation, weights: jax.Array
) -> optax.GradientTransformation:
    """An optimizer of a pair of trees: a model, and its average over the steps.

    Args:
        rule: the optimizer of the model.
        weights: of the models after each step; the second tree, zeros at first, becomes
            the average of these models.
    """
    shares = weights / weights.sum()

    def init(params):
        return rule.init(params[0]), jnp.zeros((), jnp.int32)

    def update(updates, state, params=None):
        assert params is not None
        inner, count = state
        step, inner = rule.update(updates[0], inner, params[0])
        reached = optax.apply_updates(params[0], step)
        return (step, trees.scale(shares[count], reached)), (inner, count + 1)

    return optax.GradientTransformation(init, update)
