# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clothes in MNIST's format.

Xiao, Rasul, Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine
learning algorithms" (2017, arXiv:1708.07747).
"""

from fedblend.data.dataset import Dataset, Size, dataset
from fedblend_reproductions.datasets.download import public_sets
from fedblend_reproductions.datasets.mnist import read_split

_CLOTHES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


@dataset(
    "Clothes, 28 x 28",
    Size(rows=60000, test_rows=10000, classes=10),
    "MIT; Xiao et al. 2017",
    needs=public_sets("fashion_mnist"),
    by_row=True,
)
def fashion_mnist() -> Dataset:
    """60000 + 10000 images of 10 kinds of clothes, [rows, 28, 28, 1] in [0, 1].

    Read from the data home, or from where Debian's package ``dataset-fashion-mnist``
    puts the files.
    """
    return Dataset(
        read_split("fashion_mnist", "train"),
        "classes",
        10,
        read_split("fashion_mnist", "t10k"),
        name="fashion_mnist",
        label_names=tuple(_CLOTHES.split(",")),
    )
