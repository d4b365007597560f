# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Datasets that need no files: those of scikit-learn, and those drawn at random.

**quadratics**: a small problem whose minimizer is known exactly, with
``f_i(x) = mean over the client's rows of 1/2 x^T A x - b^T x``; a row is ``(A, b)``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.checks import COUNT, WHOLE, Number, gate
from fedblend.data.dataset import Dataset, Size, dataset, generator
from fedblend.data.federated import FederatedData, federate
from fedblend.extras import require


@dataset(
    "Handwritten digits, 8 x 8",
    Size(rows=1797, classes=10),
    "CC BY 4.0; UCI, Alpaydin & Kaynak 1998",
    by_row=True,
)
def digits() -> Dataset:
    """1797 images of 10 digits, [rows, 8, 8, 1] in [0, 1]."""
    raw = require("sklearn.datasets", "digits", "scikit-learn").load_digits()
    inputs = (raw.images[..., None] / 16).astype(np.float32)
    labels = raw.target.astype(np.int32)
    return Dataset((inputs, labels), "classes", 10, name="digits")


@dataset(
    "Tumors by 30 measurements, standardized",
    Size(rows=569, classes=2),
    "CC BY 4.0; UCI, Wolberg et al. 1995",
)
def breast_cancer() -> Dataset:
    """569 tumors (Wisconsin diagnostic), 30 measurements of mean 0 and variance 1."""
    module = require("sklearn.datasets", "breast_cancer", "scikit-learn")
    raw = module.load_breast_cancer()
    inputs = (raw.data - raw.data.mean(axis=0)) / raw.data.std(axis=0)
    return Dataset(
        (inputs.astype(np.float32), raw.target.astype(np.int32)),
        "binary",
        1,
        name="breast_cancer",
        label_names=tuple(str(name) for name in raw.target_names),
        columns=tuple(str(name) for name in raw.feature_names),
    )


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
