# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The datasets that come with scikit-learn; no files needed."""

import numpy as np

from fedblend.data.dataset import Dataset, Size, dataset, require


@dataset(
    "Handwritten digits, 8 x 8",
    Size(rows=1797, classes=10),
    "CC BY 4.0; UCI, Alpaydin & Kaynak 1998",
    by_row=True,
)
def digits() -> Dataset:
    """1797 images of 10 digits, [rows, 8, 8, 1] in [0, 1]."""
    raw = require("sklearn.datasets", "digits", "scikit-learn").load_digits()
    inputs = (raw.images[..., None] / 16).astype(np.float32)
    labels = raw.target.astype(np.int32)
    return Dataset((inputs, labels), "classes", 10, name="digits")


@dataset(
    "Tumors by 30 measurements, standardized",
    Size(rows=569, classes=2),
    "CC BY 4.0; UCI, Wolberg et al. 1995",
)
def breast_cancer() -> Dataset:
    """569 tumors (Wisconsin diagnostic), 30 measurements of mean 0 and variance 1."""
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
