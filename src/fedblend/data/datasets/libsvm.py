# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Binary classification from LIBSVM's text format: ``label index:value ...`` lines.

Chang, Lin, "LIBSVM: a library for support vector machines" (ACM TIST 2011).
"""

from functools import partial
from pathlib import Path

import numpy as np

from fedblend.checks import gate, words
from fedblend.data.dataset import (
    DataError,
    Dataset,
    MissingDataError,
    Size,
    dataset,
    intact,
)
from fedblend.data.download import find, open_unpacked, public_set

_SETS = {
    "a6a": ("Adult incomes, 122 features", 11220, "CC BY 4.0 (UCI Adult)"),
    "ijcnn1": (
        "IJCNN 2001 challenge, 22 features",
        49990,
        "No license given; Prokhorov 2001",
    ),
    "mushrooms": ("Edible or not, 112 features", 8124, "CC BY 4.0 (UCI Mushroom)"),
    "w6a": ("Web pages, 300 features", 17188, "No license given; Platt 1998"),
}
"""The public datasets in this format: summary, rows, license."""


@dataset(
    "Your own file in LIBSVM format (name = its path)",
    Size(classes=2),
    "Your own",
    by_row=True,
)
@gate(dtype=words("float32", "float64"))
def libsvm(
    name: str,
    intercept: bool = False,
    features: int | None = None,
    dtype: str = "float32",
) -> Dataset:
    """A binary classification dataset as a dense array, in the order of its file.

    Args:
        name: a6a, ijcnn1, mushrooms, w6a, or the path of a file, plain or .bz2.
        intercept: append a column of ones.
        features: number of features; by default the largest index in the file (122 for
            a6a, though its series has 123).
        dtype: "float32" or "float64".
    """
    known = name in _SETS
    path = find(name, public_set(name).files[0].name) if known else Path(name)
    if not path.is_file():
        raise MissingDataError(
            f"libsvm: {name!r} is neither a file nor one of {', '.join(_SETS)}"
        )
    labels, inputs = _parse(path, features, np.dtype(dtype))
    classes, targets = np.unique(labels, return_inverse=True)
    if len(classes) != 2:
        raise DataError(
            f"{path}: {len(classes)} different labels; exactly 2 are needed"
        )
    if intercept:
        inputs = np.concatenate([inputs, np.ones((len(inputs), 1), dtype)], axis=1)
    return Dataset(
        (inputs, targets.astype(np.int32)),
        "binary",
        1,
        name=name if known else path.stem,
        label_names=tuple(f"{label:g}" for label in classes),
    )


for _name, (_summary, _rows, _license) in _SETS.items():
    _size = Size(rows=_rows, classes=2)
    _terms = f"{_license}; LIBSVM page; cite Chang & Lin 2011"
    _register = dataset(
        _summary, _size, _terms, name=_name, needs=(_name,), by_row=True
    )
    _register(partial(libsvm, _name))


def _parse(
    path: Path, features: int | None, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The labels and the dense inputs."""
    with intact(path, "cannot be read as text or .bz2"), open_unpacked(path) as file:
        lines = file.read().splitlines()
    lines = [
        line for line in (line.partition(b"#")[0] for line in lines) if line.strip()
    ]
    if not lines:
        raise DataError(f"{path}: there are no rows")
    entries = np.array([line.count(b":") for line in lines])
    try:
        numbers = np.array(b" ".join(lines).replace(b":", b" ").split(), np.float64)
    except ValueError as error:
        raise DataError(f"{path}: is not LIBSVM text: {error}") from None
    starts = np.cumsum(2 * entries + 1) - (2 * entries + 1)
    if len(numbers) != (2 * entries + 1).sum():
        raise DataError(f"{path}: is not LIBSVM text: lines of label index:value ...")
    labels = numbers[starts]
    pairs = np.delete(numbers, starts).reshape(-1, 2)
    index = pairs[:, 0].astype(np.int64)
    width = int(features or index.max(initial=1))
    if index.size and (index.min() < 1 or index.max() > width):
        wrong = index.min() if index.min() < 1 else index.max()
        raise DataError(f"{path}: feature {wrong} is not in 1..{width}")
    inputs = np.zeros((len(lines), width), dtype)
    inputs[np.repeat(np.arange(len(lines)), entries), index - 1] = pairs[:, 1]
    return labels, inputs
