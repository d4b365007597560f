# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Readers of .npz files with plain arrays. Nothing is ever unpickled."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.data.dataset import DataError, intact
from fedblend.data.preprocess.schema import Schema
from fedblend.data.readers.tables import check_names


class Raw(NamedTuple):
    """The arrays of a source, before the targets are interpreted."""

    inputs: np.ndarray
    targets: np.ndarray
    keys: np.ndarray | None
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: Schema | None = None
    """Of a raw table; the inputs are its columns as encoded by it."""
    time: np.ndarray | None = None
    groups: np.ndarray | None = None
    """As of a ``Dataset``."""


@contextmanager
def open_arrays(path: Path, problem: str) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of an .npz file; any damage raises one line with this problem."""
    with intact(path, problem), path.open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise TypeError("a single array")
        with stored:
            yield stored


def read_npz(path: Path, inputs: str, target: str | None, client: str | None) -> Raw:
    """The rows of an .npz file; without ``client`` its array "clients", if any.

    Without ``target`` only the inputs are read.
    """
    with open_arrays(path, "is damaged, or not an .npz of plain arrays") as stored:
        names = list(stored.files)
        wanted = [name for name in (inputs, target, client) if name is not None]
        check_names(wanted, names, "array", path)
        x = _inputs(_array(stored, inputs, path), inputs, path)
        if target is None:
            return Raw(x, np.empty(0), None)
        y = _array(stored, target, path)
        if client is None and "clients" in names:
            client = "clients"
        owner = None if client is None else _array(stored, client, path)
    if y.ndim not in (1, 2):
        raise DataError(
            f"{path}: {target!r} must be [rows] or [rows, width], not {y.shape}"
        )
    if owner is not None and owner.ndim != 1:
        raise DataError(f"{path}: {client!r} must be one key a row, not {owner.shape}")
    return Raw(x, y, owner)


def _inputs(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    plain = np.issubdtype(array.dtype, np.number) or array.dtype == bool
    if array.ndim < 2 or not plain:
        raise DataError(
            f"{path}: {name!r} must be numbers of shape [rows, ...], not {array.dtype} "
            f"of shape {array.shape}"
        )
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _array(stored: Any, name: str, path: Path) -> np.ndarray:
    try:
        return stored[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{path}: array {name!r} holds Python objects, which are never loaded; "
            "save numbers or texts"
        ) from None
