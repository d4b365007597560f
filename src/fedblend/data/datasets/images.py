# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""MNIST, optionally with the writer of every digit, Fashion-MNIST and FEMNIST.

LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document
recognition" (Proc. IEEE 1998). Writers from QMNIST: Yadav, Bottou, "Cold case: the
lost MNIST digits" (NeurIPS 2019). Clothes in the same format: Xiao, Rasul, Vollgraf,
"Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms"
(2017, arXiv:1708.07747).

FEMNIST has characters and digits by writer, from LEAF: Caldas et al., "LEAF: a
benchmark for federated settings" (2018); the images are those of NIST's Special
Database 19, see Cohen et al., "EMNIST" (2017). As in LEAF paper is 1 and ink is 0.
"""

import json
from pathlib import Path

import numpy as np

from fedblend.data.dataset import (
    Dataset,
    MissingDataError,
    Size,
    dataset,
    intact,
    open_unpacked,
)
from fedblend.data.download import find, find_either
from fedblend.data.readers.arrays import opened

_TYPES = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
_CLOTHES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_WRITER = 2  # the column of QMNIST's labels that holds the writer
_DIGITS = "0123456789"
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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


@dataset(
    "Handwritten characters by writer, 28 x 28",
    Size(rows=41495, test_rows=4763, classes=62, clients=300),
    "NIST SD 19, public domain; LEAF, BSD-2; Caldas et al. 2018",
    needs=("femnist",),
    model="cnn",
    by_row=True,
)
def femnist(digits_only: bool = False, file: str | None = None) -> Dataset:
    """Images of 62 characters by writer, [rows, 28, 28, 1] in [0, 1].

    Args:
        digits_only: the 10 digits alone.
        file: an .npz of ``femnist_from_leaf``; by default the 300 writers
            (41495 + 4763 images) in the data home.
    """
    path = find_either("femnist", file, "femnist_leaf_300writers.npz")
    with opened(path, "is not an .npz of LEAF's images") as raw:
        images, labels = raw["images"], raw["labels"].astype(np.int32)
        writers = raw["writer_names"][raw["writer"]]
        testing = raw["split"] == 1
    wanted = labels < 10 if digits_only else np.ones(len(labels), bool)

    def part(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return images[chosen][..., None] / np.float32(255), labels[chosen]

    names = _DIGITS if digits_only else _DIGITS + _UPPER + _UPPER.lower()
    return Dataset(
        part(wanted & ~testing),
        "classes",
        len(names),
        part(wanted & testing),
        keys=writers[wanted & ~testing],
        test_keys=writers[wanted & testing],
        name="femnist_digits" if digits_only else "femnist",
        label_names=tuple(names),
    )


def femnist_from_leaf(folder: str | Path, file: str | Path) -> None:
    """Convert the output of LEAF's preprocessing to one .npz file for ``femnist``.

    Args:
        folder: LEAF's ``data/femnist/data``, with ``train`` and ``test`` in it.
        file: the .npz file to write.
    """
    images, labels, writers, splits = [], [], [], []
    for split, name in enumerate(("train", "test")):
        paths = sorted(Path(folder, name).glob("*.json"))
        if not paths:
            raise MissingDataError(f"femnist: no .json files in {Path(folder, name)}")
        for path in paths:
            for writer, data in json.loads(path.read_text())["user_data"].items():
                pixels = np.rint(np.asarray(data["x"]) * 255).astype(np.uint8)
                images.append(pixels.reshape(-1, 28, 28))
                labels.append(np.asarray(data["y"], np.uint8))
                writers += [writer] * len(pixels)
                splits += [split] * len(pixels)
    names, index = np.unique(np.array(writers), return_inverse=True)
    np.savez_compressed(
        file,
        images=np.concatenate(images),
        labels=np.concatenate(labels),
        writer=index,
        split=np.array(splits, np.uint8),
        writer_names=names,
    )
