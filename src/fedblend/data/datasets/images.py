# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""MNIST, optionally with the writer of every digit, and Fashion-MNIST.

LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document
recognition" (Proc. IEEE 1998). Writers from QMNIST: Yadav, Bottou, "Cold case: the
lost MNIST digits" (NeurIPS 2019). Clothes in the same format: Xiao, Rasul, Vollgraf,
"Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms"
(2017, arXiv:1708.07747).
"""

from pathlib import Path

import numpy as np

from fedblend.data.dataset import Dataset, Size, dataset, intact, open_unpacked
from fedblend.data.download import find

_TYPES = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
_CLOTHES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_WRITER = 2  # the column of QMNIST's labels that holds the writer


@dataset(
    "Handwritten digits, 28 x 28, with writers if wanted",
    Size(rows=60000, test_rows=10000, classes=10, clients=539),
    "CC BY-SA 3.0; LeCun et al. 1998; writers: Yadav & Bottou 2019",
    needs=("mnist", "mnist_writers"),
    model="cnn",
    by_row=True,
)
def mnist(writers: bool = False) -> Dataset:
    """60000 + 10000 images of 10 digits, [rows, 28, 28, 1] in [0, 1].

    With ``writers`` the keys are the 539 people who wrote the training digits; the
    test digits were written by 297 others.
    """
    return Dataset(
        _split("mnist", "train"),
        "classes",
        10,
        _split("mnist", "t10k"),
        keys=_writers("train", 60000) if writers else None,
        test_keys=_writers("test", 10000) if writers else None,
        name="mnist",
    )


@dataset(
    "Clothes, 28 x 28",
    Size(rows=60000, test_rows=10000, classes=10),
    "MIT; Xiao et al. 2017",
    needs=("fashion_mnist",),
    by_row=True,
)
def fashion_mnist() -> Dataset:
    """60000 + 10000 images of 10 kinds of clothes, [rows, 28, 28, 1] in [0, 1].

    Read from the data home, or from where Debian's package ``dataset-fashion-mnist``
    puts the files.
    """
    return Dataset(
        _split("fashion_mnist", "train"),
        "classes",
        10,
        _split("fashion_mnist", "t10k"),
        name="fashion_mnist",
        label_names=tuple(_CLOTHES.split(",")),
    )


def _split(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
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
