# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits, 8 x 8: the dataset that comes with scikit-learn."""

import numpy as np

from fedblend.data.dataset import Dataset, require


def digits() -> Dataset:
    """1797 images of 10 digits, [rows, 8, 8, 1] in [0, 1]; no files needed."""
    raw = require("sklearn.datasets", "digits", "scikit-learn").load_digits()
    inputs = (raw.images[..., None] / 16).astype(np.float32)
    labels = raw.target.astype(np.int32)
    return Dataset((inputs, labels), "classes", 10, name="digits")
