# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""synthetic(gamma, beta): clients whose models differ by gamma and inputs by beta.
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
"""

import numpy as np

from fedblend.checks import COUNT, FLAG, NOT_NEGATIVE, WHOLE, Number, gate
from fedblend.data.dataset import Dataset, Size, dataset, generator
from fedblend.errors import UserError


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
