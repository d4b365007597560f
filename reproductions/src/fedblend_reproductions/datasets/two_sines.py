# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Data drawn at random: clients of two kinds, each with points of its kind's curve.

Two functions ``a sin(x + b)`` are drawn, and every client samples one of them. As
amplitudes and phases differ, one model for all fits no client, and 50 points are too
few to train alone: a mixture is best. FLIX (Gasanov et al., AISTATS 2022), experiment
"fitting sine functions". Its text draws amplitudes from [0.1, 0.5], its code from
[0.1, 5], which is the default here.
"""

import numpy as np

from fedblend.checks import COUNT, WHOLE, gate
from fedblend.data.dataset import DataError, Dataset, Rows, Size, dataset, generator


@dataset(
    "Points on one of two sine curves",
    Size(rows=10000, test_rows=400000, clients=200),
    "Drawn at random; no license needed. Cite Gasanov et al. 2022",
    model="mlp",
    by_row=True,
)
@gate(clients=COUNT, first=WHOLE, points=COUNT, test_points=COUNT, seed=WHOLE)
def two_sines(
    clients: int = 200,
    first: int = 30,
    points: int = 50,
    test_points: int = 2000,
    amplitudes: tuple[float, float] = (0.1, 5.0),
    seed: int = 0,
) -> Dataset:
    """Regression from one number to one number; keys are clients.

    Args:
        clients: number of clients.
        first: number of clients that sample the first sine (30, 50, 70, 90 in the
            paper).
        points: number of training rows of a client, at uniform places in [-5, 5].
        test_points: number of test rows of a client, likewise.
        amplitudes: range of a; b is uniform in [0, 2 pi].
        seed: of all random numbers.
    """
    if not 0 <= first <= clients or clients < 1:
        raise DataError(
            f"two_sines: first: {first} is not in 0..{clients}, the clients"
        )
    if len(amplitudes) != 2 or not amplitudes[0] <= amplitudes[1]:
        raise DataError(f"two_sines: amplitudes: {amplitudes!r} is not a range")
    rng = generator(seed, "two sines")
    size = rng.uniform(*amplitudes, size=2)
    phase = rng.uniform(0, 2 * np.pi, size=2)
    keys = np.arange(clients)

    def sample(count: int) -> Rows:
        kind = (np.repeat(keys, count) >= first).astype(int)
        x = rng.uniform(-5, 5, size=clients * count)
        y = size[kind] * np.sin(x + phase[kind])
        return x[:, None].astype(np.float32), y[:, None].astype(np.float32)

    return Dataset(
        sample(points),
        "regression",
        1,
        sample(test_points),
        keys=np.repeat(keys, points),
        test_keys=np.repeat(keys, test_points),
        name=f"two_sines({first}, {clients - first})",
    )
