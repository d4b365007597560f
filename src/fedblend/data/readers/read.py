# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Your own data: a table (.csv, .parquet), arrays (.npz), or a folder of .npz files.

A table has one column for the target, one for the client of a row, and numbers in the
others. An .npz holds the arrays ``inputs``, ``targets`` and ``clients``. In a folder
every .npz is one client, named like its file, unless client arrays are asked for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from fedblend.data.dataset import DataError, Dataset, Kind, MissingDataError, check
from fedblend.data.readers.arrays import Raw, read_folder, read_npz
from fedblend.data.readers.tables import read_table


def read(
    path: str | Path,
    *,
    target: str | None = None,
    client: str | None = None,
    inputs: str | Sequence[str] | None = None,
    kind: Kind | None = None,
) -> Dataset:
    """Read your own data, and check it.

    Args:
        path: a .csv, .parquet or .npz file, or a folder of .npz files.
        target: the column (must be given) or array ("targets") of the target.
        client: the column or array ("clients", if there) of the client of each row.
        inputs: the columns (all others by default) or the array ("inputs") of inputs.
        kind: "classes", "binary" or "regression". By default real numbers are
            regression, unless they are 0.0 and 1.0 or -1.0 and 1.0; those and two
            different integers or texts are binary, more are classes.
    """
    path = Path(path)
    if kind is not None and kind not in get_args(Kind):
        raise DataError(f"kind: {kind!r} is not one of {', '.join(get_args(Kind))}")
    raw = read_raw(path, target, client, inputs)
    dataset = _with_kind(raw, kind, path)
    check(dataset)
    return dataset


def read_raw(
    path: Path,
    target: str | None,
    client: str | None,
    inputs: str | Sequence[str] | None,
) -> Raw:
    """The arrays of a file or folder, the targets as they stand there."""
    if not path.exists():
        raise MissingDataError(f"{path}: no such file or folder")
    if path.is_dir() or path.suffix == ".npz":
        if inputs is not None and not isinstance(inputs, str):
            raise DataError(f"{path}: inputs: name one array, not a list")
        reader = read_folder if path.is_dir() else read_npz
        return reader(path, inputs or "inputs", target or "targets", client)
    if path.suffix in (".csv", ".parquet"):
        chosen = [inputs] if isinstance(inputs, str) else inputs
        return read_table(path, chosen, target, client)
    raise DataError(
        f"{path}: cannot read {path.suffix or 'a file without suffix'}; allowed "
        "are .csv, .parquet, .npz and a folder of .npz files"
    )


def _with_kind(raw: Raw, kind: Kind | None, path: Path) -> Dataset:
    """Turn targets into class numbers or float32, by their kind."""
    values = raw.targets
    if len(values) == 0:
        raise DataError(f"{path}: there are no rows")
    real = np.issubdtype(values.dtype, np.floating)
    number = np.issubdtype(values.dtype, np.number) or values.dtype == bool
    notes = raw.notes
    if kind is None and real and _two_classes(values):
        kind = "binary"
        notes += (
            f"{path.name}: targets are {' and '.join(map(str, np.unique(values)))} "
            'only, and taken as two classes; kind = "regression" takes them as numbers',
        )
    if kind == "regression" or (kind is None and real):
        if not number:
            raise DataError(
                f"{path}: regression needs numeric targets, not {values[0]!s:.40}"
            )
        targets = values.astype(np.float32)
        width = 1 if targets.ndim == 1 else targets.shape[1]
        return Dataset(
            (raw.inputs, targets), "regression", width, keys=raw.keys,
            name=path.stem, columns=raw.columns, notes=notes,
        )  # fmt: skip
    if values.ndim != 1:
        raise DataError(
            f"{path}: class targets must be one a row, not of shape {values.shape}"
        )
    if real and not (np.isfinite(values) & (values == np.rint(values))).all():
        raise DataError(f"{path}: the targets are real numbers, not {kind}")
    names, codes = np.unique(values, return_inverse=True)
    if len(names) == 1:
        raise DataError(
            f"{path}: all {len(values)} targets are {names[0]}; at least 2 classes "
            "are needed"
        )
    if kind == "binary" and len(names) != 2:
        raise DataError(f"{path}: binary targets need 2 classes, not {len(names)}")
    kind = kind or ("binary" if len(names) == 2 else "classes")
    return Dataset(
        (raw.inputs, codes.astype(np.int32)),
        kind,
        1 if kind == "binary" else len(names),
        keys=raw.keys,
        name=path.stem,
        label_names=tuple(str(name) for name in names),
        columns=raw.columns,
        notes=notes,
    )


def _two_classes(values: np.ndarray) -> bool:
    """Whether real numbers are classes in disguise, as pandas makes of integers."""
    found = np.unique(values).tolist() if values.ndim == 1 else []
    return found in ([0.0, 1.0], [-1.0, 1.0])
