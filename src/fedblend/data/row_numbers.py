# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Row numbers of clients, and what is wrong with them."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from fedblend.checks import Instance
from fedblend.core import PyTree
from fedblend.errors import SettingError, UserError, shown

PARTITION = Instance(Iterable, "a list with the row numbers of each client")


def row_numbers(key: str, partition: Iterable[Any], rows: PyTree) -> list[np.ndarray]:
    """The row numbers of each client, checked against the rows.

    Args:
        key: names the partition in an error.
        partition: for every client, the numbers of its rows.
        rows: a tree of arrays over all rows.
    """
    leaves = jax.tree.leaves(rows)
    lengths = {np.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) != 1 or () in lengths:
        seen = f"arrays of shapes {', '.join(str(np.shape(leaf)) for leaf in leaves)}"
        raise UserError("federate: rows", rows, "a tree of arrays over all rows", seen)
    ((count,),) = lengths
    parts = [np.asarray(part) for part in partition]
    if not parts:
        raise UserError(key, parts, PARTITION.called)
    for client, part in enumerate(parts):
        numbers = part.dtype.kind in "iu" or not part.size
        if part.ndim != 1 or not numbers:
            seen = f"{shown(part)} of client {client}"
            raise UserError(key, part, "a list of row numbers", seen)
        outside = part[(part < 0) | (part >= count)]
        if outside.size:
            seen = f"row {outside[0]} of client {client}"
            raise UserError(key, part, f"in [0, {count - 1}], the rows there are", seen)
    return parts


def require_one_owner(key: str, parts: list[np.ndarray]) -> None:
    """Refuse a row of two clients: one may train on what the other holds out."""
    rows = np.concatenate(parts).astype(np.int64)
    uses = np.bincount(rows, minlength=1)
    row = int(uses.argmax())
    if uses[row] > 1:
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        first, second = owner[rows == row][:2]
        raise SettingError(
            key,
            f"row {row} is listed for client {first} and again for client {second}; "
            "a row belongs to one client, once",
        )
