# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedOpt: what the server's optimizer sees and keeps."""

from typing import Any

import jax
import numpy as np
import optax

import fedblend as fb
import problems

on = problems.quadratics()
WORK: dict[str, Any] = {"steps": 2, "batch_size": None}


def run(server_optimizer, rounds=3):
    algorithm = fb.algorithms.fedopt(on.loss, fb.Work(0.1, **WORK), server_optimizer)
    return fb.simulate(
        algorithm, on.params, on.federated_data, jax.random.key(0), rounds=rounds
    ).complete()


def test_the_server_optimizer_counts_rounds():
    assert int(run(optax.adam(0.1)).server.optimizer[0].count) == 3


def test_a_schedule_of_the_server_counts_rounds():
    """A rate of 1 in the first round only: it stays where one round of FedAvg ends."""
    once = run(optax.sgd(lambda count: 1.0 * (count == 0)))
    np.testing.assert_allclose(once.shared, run(1.0, rounds=1).shared, rtol=1e-6)


def test_a_server_rate_scales_the_mean_step():
    half, whole = run(0.5, rounds=1).shared, run(1.0, rounds=1).shared
    np.testing.assert_allclose(
        half - on.params, (whole - on.params) / 2, rtol=1e-5, atol=1e-7
    )
