# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Some rows of an array: which a client uses, and how it receives and sends them.

Row numbers are sorted and unique; a ``Ragged`` has room for those of the client that
uses most, and entries behind a client's own are ignored.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree, Ragged
from fedblend.data.federated import FederatedData
from fedblend.trees import leaves_by_path, map_with_path

_NO_ROW = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Picked:
    """Some rows, one after the other, of an array of this shape."""

    values: Ragged
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})


class Use(NamedTuple):
    """The rows that clients use: ``counts`` [clients], and the largest row number."""

    counts: np.ndarray
    largest: int


def count_rows(
    federated_data: FederatedData, fields: Sequence[str], always: int = 0
) -> Use:
    """How many rows each client's training examples name in these fields.

    Args:
        federated_data: the clients.
        fields: paths of fields of the examples that hold numbers of rows.
        always: number of first rows that count for every client.
    """
    train = federated_data.train
    known = leaves_by_path(train.examples)
    columns = []
    for field in fields:
        if field not in known:
            raise ValueError(
                f"fedselect: no field {field!r} in the examples, which have "
                f"{', '.join(map(repr, known))}"
            )
        column = np.asarray(known[field])
        if not np.issubdtype(column.dtype, np.integer) or column.min(initial=0) < 0:
            raise ValueError(
                f"fedselect: field {field!r} holds {column.dtype} from "
                f"{column.min(initial=0)} on, not numbers of rows"
            )
        columns.append(column)
    counts = []
    for first, count in zip(train.starts, train.counts, strict=True):
        own = [column[first : first + count].ravel() for column in columns]
        counts.append(np.unique(np.concatenate([np.arange(always), *own])).size)
    largest = max(always - 1, *(int(column.max()) for column in columns))
    return Use(np.array(counts), largest)


def entries_touched(
    params: PyTree,
    federated_data: FederatedData,
    *,
    rows: Mapping[str, Sequence[str]],
    always: int = 0,
) -> np.ndarray:
    """Number of parameters that each client uses under ``fedselect``, [clients].

    A client receives and sends this many numbers a round, stores them, and moves them
    at every local step (2 flops each if the step is plain); without ``fedselect`` the
    number is ``trees.size(params)`` for all. Arguments as for ``fedselect``.
    """
    total = np.zeros(federated_data.clients, np.int64)
    for name, leaf in leaves_by_path(params).items():
        if name in rows:
            use = count_rows(federated_data, rows[name], always)
            total += use.counts * prod(leaf.shape[1:])
        else:
            total += leaf.size
    return total


def change(others: Mapping[str, Any], function: Callable, tree: PyTree) -> PyTree:
    """The tree with ``function(leaf, others[name])`` at the leaves of these names."""

    def change_leaf(name, leaf):
        return function(leaf, others[name]) if name in others else leaf

    return map_with_path(change_leaf, tree, is_leaf=is_picked)


def is_picked(node: Any) -> bool:
    """Whether this is a ``Picked``."""
    return isinstance(node, Picked)


def numbers_in(columns: Sequence[jax.Array], use: Use, always: int) -> Ragged:
    """The row numbers in these columns, and the first ``always``."""
    present = jnp.arange(use.largest + 1) < always
    for column in columns:
        present = present.at[column.reshape(-1)].set(True)
    most = int(use.counts.max())
    (numbers,) = jnp.nonzero(present, size=most, fill_value=_NO_ROW)
    used = jnp.minimum(present.sum(dtype=jnp.int32), most)
    return Ragged(numbers.astype(jnp.int32), used)


def places(column: jax.Array, numbers: Ragged) -> jax.Array:
    """The place of every number of a column among the client's row numbers."""
    return jnp.searchsorted(numbers.buffer, column).astype(column.dtype)


def gather(table: jax.Array, numbers: Ragged) -> Picked:
    """These rows of a table, then zeros."""
    rows = table.at[numbers.buffer].get(mode="fill", fill_value=0)
    return _pack(rows, numbers.used, table.shape)


def open_picked(node: Any) -> Any:
    """The rows as a small table, if this is a ``Picked``."""
    if not is_picked(node):
        return node
    return node.values.buffer.reshape(-1, *node.shape[1:])


def close_rows(rows: jax.Array, picked: Any) -> Any:
    """Rows of a small table as they are sent, if they came in a ``Picked``."""
    if not is_picked(picked):
        return rows
    width = max(prod(picked.shape[1:]), 1)
    return _pack(rows, picked.values.used // width, picked.shape)


def scatter(picked: Picked, numbers: Ragged) -> jax.Array:
    """The whole array, with zeros in the other rows."""
    whole = jnp.zeros(picked.shape, picked.values.buffer.dtype)
    return whole.at[_own(numbers)].set(open_picked(picked), mode="drop")


def lacking(size: int, numbers: Ragged) -> jax.Array:
    """Which of ``size`` rows are not among these."""
    return jnp.ones(size, bool).at[_own(numbers)].set(False, mode="drop")


def _own(numbers: Ragged) -> jax.Array:
    """The numbers in use; the receiver has zeros behind them."""
    place = jnp.arange(numbers.buffer.size)
    return jnp.where(place < numbers.used, numbers.buffer, _NO_ROW)


def _pack(rows: jax.Array, used: jax.Array, shape: tuple[int, ...]) -> Picked:
    return Picked(Ragged(rows.reshape(-1), used * prod(shape[1:])), tuple(shape))
