# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The same work by fedblend: ``simulate`` with ``fedavg``, as a user would call it.

With ``--shipped`` the model is fedblend's own; otherwise it is the function that the
hand-written loop uses, so that the two differ in nothing but the engine.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
import handwritten
import work
from fedblend.models.feedforward import Affine, Mlp

FOREVER = 1_000_000
"""Rounds of the run: it goes on for as long as somebody asks."""


def prepare(model, block, *, blocks=1, chunk=None, shipped=False, devices=None):
    bounds = pairwise(range(0, work.CLIENTS * work.EXAMPLES + 1, work.EXAMPLES))
    federated_data = fb.federate(work.rows(), [np.arange(*bound) for bound in bounds])
    first = jax.tree.map(jnp.asarray, work.first_params(model))
    if shipped:
        _, *hidden, _ = work.LAYERS[model]
        apply = fb.models.mlp(784, 10, hidden=hidden).apply
        first = mlp_params(first)
    else:
        apply = handwritten.apply
    algorithm = fb.fedavg(
        fb.losses.cross_entropy(apply),
        fb.Work(work.RATE, steps=work.STEPS, batch_size=work.BATCH),
    )
    run = fb.simulate(
        algorithm,
        first,
        federated_data,
        jax.random.key(0),
        rounds=FOREVER,
        every=block,
        chunk=chunk,
        devices=devices,
    )
    records = iter(run)
    next(records)

    def advance():
        for _ in range(blocks):
            next(records)
        run.wait()
        return list_params(run.down.shared) if shipped else run.down.shared

    return advance


def mlp_params(layers):
    """The parameters of fedblend's perceptron."""
    affine = [Affine(weight, bias) for weight, bias in layers]
    return Mlp(tuple(affine[:-1]), (), affine[-1])


def list_params(params):
    return [(layer.weight, layer.bias) for layer in (*params.hidden, params.last)]


if __name__ == "__main__":
    work.main(
        prepare,
        chunk={"type": int},
        shipped={"action": "store_true"},
        devices={"type": int},
    )
