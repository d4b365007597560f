# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a client computes in a round, counted by the compiler."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.simulation.communication import client_flops

ROWS, INPUTS, OUTPUTS = 32, 40, 24
rng = np.random.default_rng(0)
rows = (
    rng.normal(size=(2 * ROWS, INPUTS)).astype(np.float32),
    rng.integers(0, OUTPUTS, 2 * ROWS).astype(np.int32),
)
on = fb.federate(rows, np.split(np.arange(2 * ROWS), 2))
model = fb.models.softmax(INPUTS, OUTPUTS)
loss = fb.losses.cross_entropy(model.apply)


def test_a_step_of_softmax_regression():
    """Two products, scores and their gradient; the rest is small beside them."""
    algorithm = fb.fedavg(loss, fb.Work(0.1, steps=1, batch_size=None))
    params = jax.eval_shape(model.init, jax.random.key(0))
    products = 2 * 2 * ROWS * INPUTS * OUTPUTS
    found = client_flops(algorithm, params, on, 1)
    assert found == pytest.approx(1.1 * products, rel=0.1)
