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
)
from fedblend.extras import require
from fedblend_reproductions.datasets.download import find, public_sets

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
    path = find(name, public_sets(name)[0].files[0].name) if known else Path(name)
    if not path.is_file():
        raise MissingDataError(
            f"libsvm: {name!r} is neither a file nor one of {', '.join(_SETS)}"
        )
    labels, inputs = _read(path, features, np.dtype(dtype))
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
        _summary, _size, _terms, name=_name, needs=public_sets(_name), by_row=True
    )
    _register(partial(libsvm, _name))


def _read(
    path: Path, features: int | None, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The labels and the dense inputs."""
    reader = require("sklearn.datasets", "libsvm", "scikit-learn")
    try:
        inputs, labels = reader.load_svmlight_file(
            str(path), n_features=features, dtype=dtype, zero_based=False
        )
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{path}: is not LIBSVM text, lines of label index:value ...: {error}"
        ) from None
    if not len(labels):
        raise DataError(f"{path}: there are no rows")
    return labels, inputs.toarray()
