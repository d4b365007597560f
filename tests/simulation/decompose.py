# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Simulations whose losses decompose a matrix; the kinds that came to an end.

Arguments: the precision, the number of clients, the kinds. It prints the number of
devices first.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import expm

import fedblend as fb

SIZE = 124


KINDS = {
    "slogdet": lambda matrix: jnp.linalg.slogdet(matrix)[1],
    "cholesky": lambda matrix: jnp.diagonal(jnp.linalg.cholesky(matrix)).sum(),
    "eigh": lambda matrix: jnp.linalg.eigh(matrix)[0].sum(),
    "svd": lambda matrix: jnp.linalg.svd(matrix, compute_uv=False).sum(),
    "qr": lambda matrix: jnp.abs(jnp.diagonal(jnp.linalg.qr(matrix)[1])).sum(),
    "inv": lambda matrix: jnp.trace(jnp.linalg.inv(matrix)),
    "expm": lambda matrix: jnp.trace(expm(matrix / SIZE)),
    # As many at once on one device as XLA has threads.
    "two": lambda matrix: sum(
        jnp.linalg.slogdet(matrix + shift * jnp.eye(SIZE, dtype=matrix.dtype))[1]
        for shift in (1.0, 2.0)
    ),
}


def loss_of(kind):
    """A loss of a matrix that the parameters and the client's rows make."""

    def loss(params, batch):
        rows, _ = batch
        matrix = rows.T @ rows / len(rows) + jnp.outer(params, params)
        matrix += jnp.eye(SIZE, dtype=rows.dtype)
        return jnp.full(len(rows), KINDS[kind](matrix))

    return loss


def method_of(kind, work):
    """FedAvg on such a loss, or FLIX with Newton's method."""
    if kind != "newton":
        return fb.fedavg(loss_of(kind), work), jnp.full(SIZE, 0.1, precision)
    model = fb.models.build("logistic", (SIZE - 1,), 1, dtype=precision)
    loss = fb.losses.l2(fb.losses.logistic(model.apply), 0.01)
    local = fb.solvers.newton(loss, tolerance=1e-5)
    method = fb.flix(loss, lambda loss: fb.fedavg(loss, work), alpha=0.5, local=local)
    return method, model.init(jax.random.key(0))


precision, number, *kinds = sys.argv[1:]
jax.config.update("jax_enable_x64", precision == "float64")
clients = int(number)
drawn = np.random.default_rng(0).normal(size=(20 * clients, SIZE)).astype(precision)
ids = np.split(np.arange(20 * clients), clients)
print(len(jax.devices()), flush=True)
for kind in kinds:
    rows = drawn[:, 1:] if kind == "newton" else drawn
    data = fb.federate((rows, drawn[:, 0] > 0), ids)
    method, start = method_of(kind, fb.Work(1e-4, steps=5, batch_size=None))
    run = fb.simulate(method, start, data, jax.random.key(0), rounds=2).complete()
    if kind == "newton":
        assert run.info()["local_model_gradient_norm"].max() < 1e-4
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.shared))
    print(kind, flush=True)
