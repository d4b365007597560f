# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of an algorithm that a node compiles."""

from functools import partial

import jax

from fedblend import trees
from fedblend.core import Algorithm
from fedblend.simulation import large_constants
from fedblend.simulation.evaluate import evaluate_client


@partial(large_constants.jit, static=1)
def enroll(algorithm: Algorithm, params, shard, key):
    """What enrollment sends, and the state of the client."""
    return trees.strongly_typed(algorithm.enroll(params, shard, key))


@partial(large_constants.jit, static=1)
def ask(algorithm: Algorithm, state, shard):
    """What the client asks of a message."""
    return algorithm.wire.ask(state, shard)


@partial(large_constants.jit, static=1)
def update(algorithm: Algorithm, message, state, shard, key):
    """The answer of a round, and the state after it."""
    up, after = algorithm.client(message, state, shard, key)
    return up._replace(mean_gradient=None, step_sum=None), after


@partial(large_constants.jit, static=2)
def measure(algorithm: Algorithm, measures, deployed, state, shard, held, key):
    """The model that the client deploys, and its measures."""
    model = algorithm.personal(deployed.message, state, shard, key)
    has_shared = jax.tree.leaves(deployed.shared)
    shared = deployed.shared if has_shared else deployed.message.shared
    measured, _ = evaluate_client(algorithm, dict(measures), model, shared, held)
    return model, measured


def forget() -> None:
    """Drop everything that was compiled; what is still needed is compiled again."""
    for program in (enroll, ask, update, measure):
        program.cache_clear()  # pyright: ignore
    jax.clear_caches()
