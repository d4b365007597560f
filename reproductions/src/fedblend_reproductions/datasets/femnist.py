# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FEMNIST: characters and digits by writer, from LEAF.

Caldas et al., "LEAF: a
benchmark for federated settings" (2018); the images are those of NIST's Special
Database 19, see Cohen et al., "EMNIST" (2017). As in LEAF paper is 1 and ink is 0.
"""

import json
from pathlib import Path

import numpy as np

from fedblend.data.dataset import Dataset, MissingDataError, Size, dataset
from fedblend.data.readers.arrays import open_arrays
from fedblend_reproductions.datasets.download import find_either, public_sets

_DIGITS = "0123456789"
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataset(
    "Handwritten characters by writer, 28 x 28",
    Size(rows=41495, test_rows=4763, classes=62, clients=300),
    "NIST SD 19, public domain; LEAF, BSD-2; Caldas et al. 2018",
    needs=public_sets("femnist"),
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
    with open_arrays(path, "is not an .npz of LEAF's images") as raw:
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
