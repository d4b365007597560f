# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Breast cancer (Wisconsin diagnostic): the table that comes with scikit-learn."""

import numpy as np

from fedblend.data.dataset import Dataset, require


def breast_cancer() -> Dataset:
    """569 tumours, 30 measurements, each of mean 0 and variance 1; no files needed."""
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
