# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Data drawn at random: every client has rows of a few common linear models.

The synthetic data of FedEM. Common to all clients are ``theta_1 .. theta_M``, uniform
in [-1, 1]^dim. Client i has weights ``w_i ~ Dirichlet(alpha)``, and draws a row as::

    x uniform in [-1, 1]^dim,  z ~ w_i,  y = 1 where <x, theta_z> + noise N(0, 1) > 0

A client has ``least`` rows plus log-normal(4, 2) many, at most ``most``. No single
model fits, and with 150 inputs the median client has too few rows to train alone.

**The authors' code draws other labels**: it never moves on to the rows of the next
model, so that each model writes labels over the first rows again, and the rows beyond
those of the largest weight keep label 0. With alpha = 0.4 these are about a quarter of
all rows. ``as_in_code`` draws such labels: the table of the paper was made with them.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of
distributions" (NeurIPS 2021).
"""

import numpy as np

from fedblend.checks import COUNT, FLAG, NOT_NEGATIVE, POSITIVE, WHOLE, gate
from fedblend.data.dataset import Dataset, Size, dataset, generator
from fedblend.errors import UserError


@dataset(
    "Rows of a few common linear models, in other parts for each client",
    Size(test_rows=1500000, classes=2, clients=300),
    "Drawn at random; no license needed. Cite Marfoq et al. 2021",
    by_row=True,
)
@gate(
    **dict.fromkeys(("clients", "components", "dim", "least", "most"), COUNT),
    alpha=POSITIVE,
    noise=NOT_NEGATIVE,
    test_points=COUNT,
    as_in_code=FLAG,
    seed=WHOLE,
)
def synthetic_mixture(
    clients: int = 300,
    components: int = 3,
    dim: int = 150,
    alpha: float = 0.4,
    noise: float = 0.1,
    least: int = 50,
    most: int = 1000,
    test_points: int = 5000,
    as_in_code: bool = False,
    seed: int = 0,
) -> Dataset:
    """Binary labels by one of a few linear models for each row; keys are clients.

    Args:
        clients: number of clients.
        components: number of linear models.
        dim: number of inputs of a row.
        alpha: of the Dirichlet distribution; the smaller, the more clients differ.
        noise: standard deviation of the noise on a score.
        least: smallest number of rows of a client.
        most: largest number of rows of a client.
        test_points: number of test rows of a client; 5,000 are 900 MB in all.
        as_in_code: draw the labels of the authors' code instead of the paper's.
        seed: of all random numbers.
    """
    if most < least:
        raise UserError("synthetic_mixture: most", most, f"at least {least}, as least")
    rng = generator(seed, "synthetic mixture")
    extra = np.minimum(rng.lognormal(4, 2, clients), most).astype(np.int64)
    counts = np.minimum(least + extra, most)
    weights = rng.dirichlet(np.full(components, alpha), clients)
    thetas = rng.uniform(-1, 1, (components, dim))

    def labels(inputs: np.ndarray, model: int) -> np.ndarray:
        scores = inputs @ thetas[model] + noise * rng.standard_normal(len(inputs))
        return scores > 0

    def sample(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = 2 * rng.random((numbers.sum(), dim), np.float32) - 1
        targets = np.zeros(numbers.sum(), np.int32)
        for client, end in enumerate(np.cumsum(numbers)):
            place = first = end - numbers[client]
            for model, many in enumerate(
                rng.multinomial(numbers[client], weights[client])
            ):
                own = slice(place, place + many)
                targets[own] = labels(inputs[own], model)
                place = first if as_in_code else place + many
        return inputs, targets

    tests = np.full(clients, test_points)
    return Dataset(
        sample(counts),
        "binary",
        1,
        sample(tests),
        keys=np.repeat(np.arange(clients), counts),
        test_keys=np.repeat(np.arange(clients), tests),
        name=f"synthetic_mixture({components}, {alpha:g})",
    )
