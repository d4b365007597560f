# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedProx: the pull holds the local model near the shared one, over any tree."""

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import trees

on = problems.classes()


def moved(mu) -> float:
    algorithm = fb.algorithms.fedprox(
        on.loss, fb.Work(0.05, steps=20, batch_size=None), mu=mu
    )
    run = fb.simulate(
        algorithm, on.params, on.federated_data, jax.random.key(0), rounds=1
    ).complete()
    return float(trees.sum_squares(trees.subtract(run.shared, on.params)))


@pytest.mark.slow
def test_a_stronger_pull_moves_less():
    distances = [moved(mu) for mu in (0.0, 1.0, 10.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[2] < 0.2 * distances[0]
    assert np.isfinite(distances).all()
