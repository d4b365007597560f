# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Datasets that need no files: those of scikit-learn, and those drawn at random.

Data drawn at random: linear models, quadratics.

**synthetic(gamma, beta)**: clients whose models differ by gamma and inputs by beta.
Client i labels inputs by a model of its own::

    y = argmax(W_i x + b_i),   W_i, b_i ~ N(u_i, 1),        u_i ~ N(0, gamma)
    x ~ N(nu_i, Sigma),        nu_i ~ N(V_i, 1),            V_i ~ N(0, beta)

with ``Sigma_kk = k^-1.2``. gamma and beta are standard deviations, as in the code of
both papers (at the usual 0 and 1 the variance is the same). W_i is drawn for every
client also at gamma = 0, so the clients of synthetic(0, 0) are alike in distribution
but do not share a model.

In both papers' code u_i is one number, which adds the same to the scores of all
classes, so that gamma changes no label; APFL's text, where u_i is a vector, allows one
number for each class, with which gamma has an effect: ``by_class``.

Li et al., "Federated optimization in heterogeneous networks" (MLSys 2020); Deng,
Kamani, Mahdavi, "Adaptive personalized federated learning" (2020).

**quadratics**: a small problem whose minimizer is known exactly, with
``f_i(x) = mean over the client's rows of 1/2 x^T A x - b^T x``; a row is ``(A, b)``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.checks import COUNT, FLAG, NOT_NEGATIVE, WHOLE, Number, gate
from fedblend.data.dataset import Dataset, Size, dataset, generator, require
from fedblend.data.federated import FederatedData, federate
from fedblend.errors import UserError


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


@dataset(
    "Linear models that differ by client (gamma, beta)",
    Size(classes=10, clients=100),
    "Drawn at random; no license needed. Cite Li et al. 2020",
    by_row=True,
)
@gate(
    gamma=NOT_NEGATIVE,
    beta=NOT_NEGATIVE,
    classes=Number(least=2, whole=True),
    seed=WHOLE,
    by_class=FLAG,
    **dict.fromkeys(("clients", "dim", "least", "most"), COUNT),
)
def synthetic(
    gamma: float,
    beta: float,
    clients: int = 100,
    dim: int = 60,
    classes: int = 10,
    seed: int = 0,
    least: int = 500,
    most: int = 1000,
    by_class: bool = False,
) -> Dataset:
    """Gaussian inputs, labeled by each client's own linear model; keys are clients.

    Args:
        gamma: how much the clients' models differ.
        beta: how much the clients' inputs differ.
        clients: number of clients.
        dim: number of inputs of a row.
        classes: number of classes; two make a binary dataset.
        seed: of all random numbers.
        least: smallest number of rows of a client; log-normal(3, 2) more, as in APFL's
            code.
        most: largest number of rows of a client.
        by_class: draw u_i for each class; by default one number, as in the code.
    """
    if most < least:
        raise UserError("synthetic: most", most, f"at least {least}, as least is")
    rng = generator(seed, "synthetic")
    extra = np.minimum(rng.lognormal(3, 2, clients), most).astype(np.int64)
    counts = np.minimum(least + extra, most)
    spread = np.arange(1, dim + 1) ** -0.6
    inputs = np.empty((counts.sum(), dim), np.float32)
    targets = np.empty(counts.sum(), np.int32)
    for start, count in zip(np.cumsum(counts) - counts, counts, strict=True):
        mean = gamma * rng.standard_normal(classes if by_class else 1)
        weights = mean + rng.standard_normal((dim, classes))
        bias = mean + rng.standard_normal(classes)
        center = beta * rng.standard_normal() + rng.standard_normal(dim)
        x = center + spread * rng.standard_normal((count, dim))
        inputs[start : start + count] = x
        targets[start : start + count] = np.argmax(x @ weights + bias, axis=1)
    binary = classes == 2
    return Dataset(
        (inputs, targets),
        "binary" if binary else "classes",
        1 if binary else classes,
        keys=np.repeat(np.arange(clients), counts),
        name=f"synthetic({gamma:g}, {beta:g})",
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
