# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated select: a client receives, trains and returns only the rows it uses.

Wraps an algorithm. With E a parameter of many rows (a table of embeddings) and R_i the
rows that stand in the examples of client i, a round is::

    client i  requests R_i           computed from its own examples, sorted
    server    sends E[R_i]           and the rest of the message; of a correction the
                                     same rows
    client i  runs the wrapped algorithm with E[R_i] in place of E
    client i  sends delta[R_i], R_i
    server    puts delta[R_i] into zeros of E's shape, and continues as usual

It is the wrapped run, bit for bit: rows that a client lacks have no gradient, so that
the client would not move them. A correction b would move them by ``-step_sum_i b``,
which the server adds (to rounding); the client sends step_sum_i, rate times steps, as
one more number. This is right for clients that take plain steps of one rate; others are
refused.

*Numbers.* The examples of a client name rows of E; the client's table has its rows
alone, the j-th being the j-th of R_i. Before training, every number in the fields
named in ``rows`` becomes its place in R_i. Numbers with a meaning of their own, such as
a padding of 0, must not change: every client requests the first ``always`` rows.

*Memory and bits.* All clients have room for as many rows as the largest R_i has, but a
client receives and sends its own rows only, and R_i once a round; bits are counted so.
The final model is the whole one: the last broadcast is not cut.

Row numbers are sorted and unique; a ``Ragged`` has room for those of the client that
uses most, and entries behind a client's own are ignored.

The loss may use a row of E only if an example of the client names it. A penalty on all
of E belongs to the server (``mixed_fl``). On accelerators that add the gradients of a
table in no fixed order, no run repeats bit for bit, with or without this transform.

Where this differs from the paper: it does not say how clients request rows.

Reference: Charles, Bonawitz, Chiknavaryan, McMahan, Agüera y Arcas, "Federated select:
a primitive for communication- and memory-efficient federated learning", 2022,
arXiv:2208.09432.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.batches import everything
from fedblend.checks import Whole, gate
from fedblend.compress.compressor import Encoded
from fedblend.core import Algorithm, PyTree, Ragged, Shard, Wire
from fedblend.data.federated import FEDERATED_DATA, FederatedData
from fedblend.transforms._compose import delta_of
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


@gate()
def fedselect(
    algorithm: Algorithm,
    federated_data: Annotated[FederatedData, FEDERATED_DATA],
    *,
    rows: Mapping[str, Sequence[str]],
    always: Whole = 0,
) -> Algorithm:
    """The wrapped algorithm, with messages that hold the rows that a client uses.

    Args:
        algorithm: what to run, without client states; an encoding transform goes
            outermost, and only once.
        federated_data: the data of all clients, for the number of rows they use.
        rows: for the path of a parameter, such as "embedding" or "last/weight", the
            fields of the examples that hold numbers of its rows, by their paths ("0"
            and "1" are the inputs and the targets of a pair).
        always: number of first rows that every client gets, whose numbers stay.
    """
    uses = {
        name: count_rows(federated_data, fields, always)
        for name, fields in _group_fields(rows).items()
    }
    return select_within(algorithm, uses, rows=rows, always=always)


def select_within(
    algorithm: Algorithm,
    most: Mapping[str, Use],
    *,
    rows: Mapping[str, Sequence[str]],
    always: int = 0,
) -> Algorithm:
    """``fedselect`` for clients whose examples are on other machines.

    Args:
        algorithm: what to run, as for ``fedselect``.
        most: for the path of a parameter, bounds on the rows of it that clients use.
        rows: fields that hold row numbers, as for ``fedselect``.
        always: number of first rows that every client gets.
    """
    fields_of = _group_fields(rows)
    uses = {group: most[name] for name, group in fields_of.items()}
    groups = list(uses)

    def request_rows(shard: Shard) -> tuple[Ragged, ...]:
        """The rows that a client uses, for each group of fields."""
        own = leaves_by_path(everything(shard).rows)
        return tuple(
            numbers_in([own[field] for field in group], use, always)
            for group, use in uses.items()
        )

    def name_rows(wanted: Sequence[Ragged]) -> dict[str, Ragged]:
        return {n: wanted[groups.index(group)] for n, group in fields_of.items()}

    def enroll(params, shard, key):
        join, client = algorithm.enroll(params, shard, key)
        if jax.tree.leaves((join, client)):
            raise ValueError(
                "fedselect: clients of the wrapped algorithm have a state or send "
                "something at enrollment, for which they would need all rows"
            )
        return join, client

    def start(params, joins, central, key):
        for name, group in fields_of.items():
            _check_rows(params, name, uses[group].largest)
        return algorithm.start(params, joins, central, key)

    def ask(client, shard):
        return algorithm.wire.ask(client, shard), request_rows(shard)

    def tell(down, request):
        inner, wanted = request
        message = algorithm.wire.tell(down, inner)
        if isinstance(message.correction, Encoded):
            raise ValueError("fedselect: an encoded correction has no rows to pick")
        _refuse_tables(message.extra, message.shared, fields_of)
        shared, correction = (
            change(name_rows(wanted), gather, tree)
            for tree in (message.shared, message.correction)
        )
        return message._replace(shared=shared, correction=correction)

    def client(down, client, shard, key):
        wanted, given = request_rows(shard), everything(shard).rows
        numbers = {
            field: ids
            for group, ids in zip(groups, wanted, strict=True)
            for field in group
        }
        examples = change(numbers, places, given)
        own = dataclasses.replace(
            shard, examples=examples, start=jnp.zeros_like(shard.start)
        )
        received = leaves_by_path(down.shared, is_picked)
        if not all(is_picked(received[name]) for name in fields_of):
            raise ValueError("fedselect: a transform around it sends whole tables")
        small = jax.tree.map(open_picked, down, is_leaf=is_picked)
        up, client = algorithm.client(small, client, own, key)
        _refuse_tables(up.extra, small.shared, fields_of)
        corrected = not set(fields_of).isdisjoint(leaves_by_path(small.correction))
        if corrected and up.step_sum is None:
            raise ValueError(
                "fedselect: clients of the wrapped algorithm do not take plain steps "
                "of one rate, so that it is unknown how a correction moves the rows "
                "they lack"
            )
        asked, places_of = leaves_by_path(given), leaves_by_path(examples)
        found = jnp.stack(
            [
                (ids.buffer[places_of[field]] == asked[field]).all()
                for field, ids in numbers.items()
            ]
        ).all()
        delta = jax.tree.map(
            # A client with more rows than planned sends nothing usable.
            lambda leaf, row: close_rows(jnp.where(found, leaf, jnp.nan), row),
            delta_of(up, "fedselect"),
            down.shared,
        )
        own_extra = wanted, up.step_sum if corrected else ()
        extra = up.extra | {"fedselect": own_extra}
        return up._replace(
            delta=delta, mean_gradient=None, step_sum=None, extra=extra
        ), client

    def decode(up, sender):
        wanted, step_sum = up.extra["fedselect"]
        own, delta = (
            name_rows(wanted),
            leaves_by_path(up.delta, is_picked),
        )
        lack = tuple(
            lacking(delta[name].shape[0], ids).astype(far.dtype) * far
            for name, ids in own.items()
            for far in jax.tree.leaves(step_sum)
        )
        whole = change(own, scatter, up.delta)
        inner = algorithm.wire.decode(up._replace(delta=whole), sender)
        return inner._replace(extra=inner.extra | {"fedselect": lack})

    def server(aggregate, down, server, central, key):
        lack = aggregate.mean.extra["fedselect"]
        correction = leaves_by_path(down.correction)
        drift = {
            name: _scale_rows(far, correction[name])
            for name, far in zip(fields_of, lack, strict=bool(lack))
            if name in correction
        }
        delta = change(drift, jnp.subtract, aggregate.mean.delta)
        aggregate = aggregate._replace(mean=aggregate.mean._replace(delta=delta))
        return algorithm.server(aggregate, down, server, central, key)

    return algorithm._replace(
        enroll=enroll,
        start=start,
        client=client,
        server=server,
        wire=Wire(ask, tell, decode),
        # The median of rows that most clients lack is zero.
        needs=algorithm.needs._replace(mean=True, whole=True),
    )


def _group_fields(rows: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The fields of each parameter; a field can be renumbered in one way only."""
    if not rows:
        raise ValueError("fedselect: rows names no parameter")
    group_of: dict[str, tuple[str, ...]] = {}
    for name, fields in rows.items():
        if isinstance(fields, str) or not fields:
            raise ValueError(
                f"fedselect: rows of {name!r}: {fields!r} is no list of fields"
            )
        for field in fields:
            if group_of.setdefault(field, tuple(fields)) != tuple(fields):
                raise ValueError(
                    f"fedselect: field {field!r} is among {group_of[field]} and among "
                    f"{tuple(fields)}; parameters that share a field share all"
                )
    return {name: tuple(fields) for name, fields in rows.items()}


def _check_rows(params: PyTree, name: str, largest: int) -> None:
    leaves = leaves_by_path(params)
    if name not in leaves:
        raise ValueError(
            f"fedselect: no parameter {name!r}, there are "
            f"{', '.join(map(repr, leaves))}"
        )
    shape = leaves[name].shape
    if not shape or largest >= shape[0]:
        raise ValueError(
            f"fedselect: the examples name row {largest} of {name!r}, whose shape is "
            f"{tuple(shape)}"
        )


def _refuse_tables(extra: PyTree, shared: PyTree, names: Mapping[str, object]) -> None:
    """Refuse other tables in a message, whose rows nobody would pick; or no table."""
    leaves = leaves_by_path(shared)
    for name in names.keys() - leaves.keys():
        raise ValueError(f"fedselect: the wrapped algorithm does not send {name!r}")
    shapes = {leaves[name].shape for name in names}
    for leaf in jax.tree.leaves(extra):
        if leaf.shape in shapes:
            raise ValueError(
                "fedselect: messages of the wrapped algorithm hold more than the model "
                f"and its correction: a table of shape {leaf.shape}"
            )


def _scale_rows(factors: jax.Array, table: jax.Array) -> jax.Array:
    spread = factors.reshape(-1, *(1,) * (table.ndim - 1))
    return spread.astype(table.dtype) * table


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
