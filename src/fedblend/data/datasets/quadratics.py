# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Quadratics: a small federated problem whose minimizer is known exactly.

``f_i(x) = mean over the client's rows of 1/2 x^T A x - b^T x``; a row is ``(A, b)``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.checks import COUNT, WHOLE, Number, gate
from fedblend.data.dataset import generator
from fedblend.data.federated import FederatedData, federate


@gate(clients=COUNT, dim=COUNT, seed=WHOLE, condition=Number(least=1), rows=COUNT)
def quadratics(
    clients: int, dim: int, seed: int = 0, condition: float = 10.0, rows: int = 1
) -> tuple[FederatedData, np.ndarray]:
    """Federated data of quadratics, and the minimizer of the mean of all f_i.

    Args:
        clients: number of clients.
        dim: length of x.
        seed: of all random numbers.
        condition: eigenvalues of every A run from 1 to this number.
        rows: number of quadratics of a client; more than 1 makes batches noisy.
    """
    rng = generator(seed, "quadratics")
    total = clients * rows
    axes, _ = np.linalg.qr(rng.standard_normal((total, dim, dim)))
    matrices = (axes * np.geomspace(1, condition, dim)) @ axes.swapaxes(1, 2)
    vectors = rng.standard_normal((total, dim))
    partition = np.split(np.arange(total), clients)
    optimum = np.linalg.solve(matrices.mean(axis=0), vectors.mean(axis=0))
    return federate((matrices, vectors), partition, seed=seed), optimum


def quadratic_loss(params: jax.Array, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
    """``1/2 x^T A x - b^T x`` of each row ``(A, b)``, in the dtype of x.

    >>> federated_data, optimum = quadratics(clients=4, dim=3)
    >>> float(quadratic_loss(jnp.zeros(3), federated_data.train.rows(0))[0])
    0.0
    """
    matrices, vectors = (jnp.asarray(part, params.dtype) for part in rows)
    return 0.5 * jnp.einsum("i,nij,j->n", params, matrices, params) - vectors @ params
