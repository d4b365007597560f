# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST, against facts its authors publish."""

import numpy as np

from fedblend.data.datasets import load


def test_fashion_mnist(needs):
    needs("fashion_mnist")
    dataset = load("fashion_mnist")
    inputs, labels = dataset.rows
    assert inputs.shape == (60000, 28, 28, 1)
    np.testing.assert_allclose(inputs.mean(), 0.28604, atol=1e-5)
    np.testing.assert_allclose(inputs.std(), 0.35302, atol=1e-5)
    assert np.bincount(labels).tolist() == [6000] * 10
    assert dataset.label_names[labels[0]] == "Ankle boot"
    assert dataset.test_rows is not None
    assert np.bincount(dataset.test_rows[1]).tolist() == [1000] * 10
