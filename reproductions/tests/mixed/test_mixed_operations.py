# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The compiler's count of operations, for a step whose products are known."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend_reproductions.mixed.operations import client_flops


def test_the_compiler_counts_a_step_of_softmax_regression():
    """Two products, scores and their gradient; the rest is small beside them."""
    count, inputs, outputs = 32, 40, 24
    rng = np.random.default_rng(0)
    rows = (
        rng.normal(size=(2 * count, inputs)).astype(np.float32),
        rng.integers(0, outputs, 2 * count).astype(np.int32),
    )
    federated_data = fb.federate(rows, np.split(np.arange(2 * count), 2))
    model = fb.models.softmax(inputs, outputs)
    loss = fb.losses.cross_entropy(model.apply)
    algorithm = fb.fedavg(loss, fb.Work(0.1, steps=1, batch_size=None))
    params = jax.eval_shape(model.init, jax.random.key(0))
    products = 2 * 2 * count * inputs * outputs
    found = client_flops(algorithm, params, federated_data, 1)
    assert found == pytest.approx(1.1 * products, rel=0.1)
