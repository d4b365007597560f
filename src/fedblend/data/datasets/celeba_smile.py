# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Smiling or not: CelebA faces at 28 x 28, for Mixed FL's smile classifier.

Liu, Luo, Wang, Tang, "Deep learning face attributes in the wild" (ICCV 2015); for
non-commercial research only, not to be passed on.

The three files, made from the aligned 178 x 218 images (whole frame, bilinear):
``train_5000_28x28.webp`` and ``test_1000_28x28.webp`` are lossless mosaics, 100 and
50 tiles a row; ``labels.json`` holds ``{"train_5000": {"smiling": [...], "male":
[...]}, "test_1000": ...}`` of 0 and 1.
"""

import json

import numpy as np

from fedblend.checks import gate, words
from fedblend.data.catalog import Size, dataset
from fedblend.data.dataset import Dataset
from fedblend.data.datasets.mosaic import read_mosaic
from fedblend.data.download import find


@dataset(
    "Faces, 28 x 28, smiling or not",
    Size(rows=5000, test_rows=1000, classes=2),
    "Non-commercial research only, not to be passed on; Liu et al. 2015",
)
@gate(target=words("smiling", "male"))
def celeba_smile(target: str = "smiling") -> Dataset:
    """5000 + 1000 faces, [rows, 28, 28, 3] in [0, 1], half of them smiling.

    Args:
        target: "smiling" or "male".
    """
    labels = json.loads(find("celeba_smile", "labels.json").read_text())

    def rows(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = read_mosaic(find("celeba_smile", f"{name}_28x28.webp"), 28, count)
        return inputs, np.asarray(labels[name][target], np.int32)

    train, test = rows("train_5000", 5000), rows("test_1000", 1000)
    names = (f"not {target}", target)
    return Dataset(train, "binary", 1, test, name="celeba_smile", label_names=names)
