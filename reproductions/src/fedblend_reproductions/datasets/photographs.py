# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Small color photographs: CIFAR-10, all of it or a lossless part, and CelebA's faces.

CIFAR-10: Krizhevsky, "Learning multiple layers of features from tiny images" (2009).
CelebA: Liu, Luo, Wang, Tang, "Deep learning face attributes in the wild" (ICCV 2015);
for non-commercial research only, not to be passed on.

The part of CIFAR-10 and the faces (made from the aligned 178 x 218 images: whole frame,
bilinear) are lossless mosaics, images whose tiles are the rows, with a ``labels.json``.
That of the faces holds ``{"train_5000": {"smiling": [...], "male": [...]}, "test_1000":
...}`` of 0 and 1.
"""

import json
import tarfile
from pathlib import Path

import numpy as np

from fedblend.checks import gate, words
from fedblend.data.dataset import (
    DataError,
    Dataset,
    Rows,
    Size,
    dataset,
    intact,
)
from fedblend.extras import require
from fedblend_reproductions.datasets.download import find, public_sets

_ARCHIVE = "cifar-10-binary.tar.gz"
_LABELS = "labels.json"
_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_RECORD = 1 + 3 * 32 * 32  # a label, then the planes red, green, blue


@dataset(
    "Photographs, 32 x 32, or a part (10000 + 2000)",
    Size(rows=50000, test_rows=10000, classes=10),
    "No formal license; Krizhevsky 2009",
    needs=public_sets("cifar10"),
    model="cnn",
    by_row=True,
)
def cifar10(full: bool | None = None) -> Dataset:
    """Images of 10 classes, [rows, 32, 32, 3] in [0, 1].

    Args:
        full: True: the official 50000 + 10000; False: the part, 10000 (the official
            first batch) + 2000; by default the official one where its file exists.
    """
    if full is None:
        full = find("cifar10", _ARCHIVE, _LABELS).name == _ARCHIVE
    train, test = _archive(find("cifar10", _ARCHIVE)) if full else _part()
    name = "cifar10" if full else "cifar10_part"
    return Dataset(
        train, "classes", 10, test, name=name, label_names=tuple(_CLASSES.split())
    )


@dataset(
    "Faces, 28 x 28, smiling or not",
    Size(rows=5000, test_rows=1000, classes=2),
    "Non-commercial research only, not to be passed on; Liu et al. 2015",
    needs=public_sets("celeba_smile"),
    model="cnn",
    by_row=True,
)
@gate(target=words("smiling", "male"))
def celeba_smile(target: str = "smiling") -> Dataset:
    """5000 + 1000 faces, [rows, 28, 28, 3] in [0, 1], half of them smiling.

    Args:
        target: "smiling" or "male".
    """
    labels = json.loads(find("celeba_smile", _LABELS).read_text())

    def rows(part: str, count: int) -> Rows:
        inputs = _mosaic(find("celeba_smile", f"{part}_28x28.webp"), 28, count)
        return inputs, np.asarray(labels[part][target], np.int32)

    train, test = rows("train_5000", 5000), rows("test_1000", 1000)
    names = (f"not {target}", target)
    return Dataset(train, "binary", 1, test, name="celeba_smile", label_names=names)


def _part() -> tuple[Rows, Rows]:
    labels = json.loads(find("cifar10", _LABELS).read_text())

    def rows(part: str, count: int) -> Rows:
        inputs = _mosaic(find("cifar10", f"{part}.webp"), 32, count)
        return inputs, np.asarray(labels[part], np.int32)

    return rows("train_batch1_10000", 10000), rows("test_first2000", 2000)


def _archive(path: Path) -> tuple[Rows, Rows]:
    """The training and test rows of the official archive."""
    wanted = [f"data_batch_{batch}.bin" for batch in range(1, 6)] + ["test_batch.bin"]
    found = {}
    problem = "is not the complete CIFAR-10 archive; delete it and get it again"
    with intact(path, problem), tarfile.open(path, "r|gz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None and Path(member.name).name in wanted:
                content = np.frombuffer(file.read(), np.uint8)
                found[Path(member.name).name] = content.reshape(-1, _RECORD)
        batches = [found[name] for name in wanted]
    return _records(np.concatenate(batches[:5])), _records(batches[5])


def _records(records: np.ndarray) -> Rows:
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    inputs = np.ascontiguousarray(planes.transpose(0, 2, 3, 1)) / np.float32(255)
    return inputs, records[:, 0].astype(np.int32)


def _mosaic(path: Path, side: int, count: int) -> np.ndarray:
    """The tiles of an image file, row by row: [count, side, side, 3] in [0, 1]."""
    image = require("PIL.Image", path.name, "pillow")
    with intact(path, "is not a readable image"), image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    down, across = pixels.shape[0] // side, pixels.shape[1] // side
    if pixels.shape != (down * side, across * side, 3) or down * across != count:
        raise DataError(
            f"{path}: {pixels.shape[0]} x {pixels.shape[1]} pixels are not {count} "
            f"tiles of {side} x {side}"
        )
    tiles = pixels.reshape(down, side, across, side, 3).swapaxes(1, 2)
    return tiles.reshape(count, side, side, 3) / np.float32(255)
