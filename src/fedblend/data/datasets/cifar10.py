# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10: all of it, or a lossless part.

Krizhevsky, "Learning multiple layers of features from tiny images" (2009).
"""

import json
import tarfile
import zlib
from pathlib import Path

import numpy as np

from fedblend.data.catalog import Size, dataset
from fedblend.data.dataset import DataError, Dataset
from fedblend.data.datasets.mosaic import read_mosaic
from fedblend.data.download import find

_ARCHIVE = "cifar-10-binary.tar.gz"
_LABELS = "labels.json"
_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_RECORD = 1 + 3 * 32 * 32  # a label, then the planes red, green, blue


@dataset(
    "Photographs, 32 x 32, or a part (10000 + 2000)",
    Size(rows=50000, test_rows=10000, classes=10),
    "No formal license; Krizhevsky 2009",
)
def cifar10(full: bool | None = None) -> Dataset:
    """Images of 10 classes, [rows, 32, 32, 3] in [0, 1].

    Args:
        full: True: the official 50000 + 10000; False: the part, 10000 (the official
            first batch) + 2000; by default the official one where its file exists.
    """
    if full is None:
        full = find("cifar10", _ARCHIVE, _LABELS).name == _ARCHIVE
    train, test = _whole() if full else _part()
    name = "cifar10" if full else "cifar10_part"
    return Dataset(
        train, "classes", 10, test, name=name, label_names=tuple(_CLASSES.split())
    )


def _part() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    labels = json.loads(find("cifar10", _LABELS).read_text())

    def rows(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = read_mosaic(find("cifar10", f"{name}.webp"), 32, count)
        return inputs, np.asarray(labels[name], np.int32)

    return rows("train_batch1_10000", 10000), rows("test_first2000", 2000)


def _whole() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    path = find("cifar10", _ARCHIVE)
    wanted = [f"data_batch_{batch}.bin" for batch in range(1, 6)] + ["test_batch.bin"]
    found = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None and Path(member.name).name in wanted:
                    content = np.frombuffer(file.read(), np.uint8)
                    found[Path(member.name).name] = content.reshape(-1, _RECORD)
        batches = [found[name] for name in wanted]
    except (tarfile.TarError, OSError, EOFError, zlib.error, KeyError, ValueError):
        raise DataError(
            f"{path}: is not the complete CIFAR-10 archive; delete it and get it again"
        ) from None
    return _records(np.concatenate(batches[:5])), _records(batches[5])


def _records(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    inputs = np.ascontiguousarray(planes.transpose(0, 2, 3, 1)) / np.float32(255)
    return inputs, records[:, 0].astype(np.int32)
