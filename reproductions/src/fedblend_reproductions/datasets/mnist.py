# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""MNIST, also with the writer of every digit.

LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document
recognition" (Proc. IEEE 1998). Writers from QMNIST: Yadav, Bottou, "Cold case: the
lost MNIST digits" (NeurIPS 2019).
"""

from pathlib import Path

import numpy as np

from fedblend.data.dataset import Dataset, Size, dataset, intact, open_unpacked
from fedblend_reproductions.datasets.download import find, public_sets

_TYPES = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
_WRITER = 2  # the column of QMNIST's labels that holds the writer


@dataset(
    "Handwritten digits, 28 x 28",
    Size(rows=60000, test_rows=10000, classes=10),
    "CC BY-SA 3.0; LeCun et al. 1998",
    needs=public_sets("mnist"),
    model="cnn",
    by_row=True,
)
def mnist() -> Dataset:
    """60000 + 10000 images of 10 digits, [rows, 28, 28, 1] in [0, 1]."""
    train, test = read_split("mnist", "train"), read_split("mnist", "t10k")
    return Dataset(train, "classes", 10, test, name="mnist")


@dataset(
    "Handwritten digits by writer, 28 x 28",
    Size(rows=60000, test_rows=10000, classes=10, clients=539),
    "CC BY-SA 3.0; LeCun et al. 1998; writers: Yadav & Bottou 2019",
    needs=public_sets("mnist", "mnist_writers"),
    model="cnn",
    by_row=True,
)
def mnist_writers() -> Dataset:
    """MNIST; keys are the 539 people who wrote the training digits.

    The test digits were written by 297 others.
    """
    return mnist()._replace(
        keys=_writers("train", 60000), test_keys=_writers("test", 10000)
    )


def read_split(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a public set in idx files: "train" or "t10k"."""
    images = _read_idx(find(name, f"{part}-images-idx3-ubyte.gz"))
    labels = _read_idx(find(name, f"{part}-labels-idx1-ubyte.gz"))
    return images[..., None] / np.float32(255), labels.astype(np.int32)


def _writers(part: str, rows: int) -> np.ndarray:
    table = _read_idx(find("mnist_writers", f"qmnist-{part}-labels-idx2-int.gz"))
    return table[:rows, _WRITER].astype(np.int64)


def _read_idx(path: Path) -> np.ndarray:
    """The array in a gzipped idx file: magic number, shape, numbers."""
    problem = "is not a complete gzipped idx file; delete it and get it again"
    with intact(path, problem), open_unpacked(path) as file:
        content = file.read()
        kind = _TYPES[content[2]]
        axes = content[3]
        shape = np.frombuffer(content, ">i4", axes, 4)
        return np.frombuffer(content, kind, offset=4 + 4 * axes).reshape(shape)
