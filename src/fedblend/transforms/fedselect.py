# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated select: a client receives, trains and returns only the rows it uses.

Wraps an algorithm. With E a parameter of many rows (a table of embeddings) and R_i the
rows that stand in the examples of client i, a round is::

    client i asks for R_i         computed from its own examples, sorted
    server tells it E[R_i]        and the rest of the message; of a correction the same
    rows client i runs the wrapped algorithm with E[R_i] in place of E client i says
    delta[R_i], R_i server puts delta[R_i] into zeros of E's shape, and goes on as it
    would

It is the wrapped run, bit for bit: rows that a client lacks have no gradient, so that
it would not move them. A correction b would move them by ``-stretch_i b``, which the
server adds (to rounding), stretch_i, rate times steps, being one more number that
travels; this is right for clients that take plain steps of one rate, and others are
refused.

*Numbers.* The examples of a client name rows of E; the client's table has its rows
alone, the j-th being the j-th of R_i. Before it trains, every number in the fields
named in ``rows`` becomes its place in R_i. A number with a meaning of its own, such as
a padding of 0, has to keep it: the first ``always`` rows are asked for by everybody.

*Memory and bits.* All clients have room for as many rows as the largest R_i has, but
only its own rows of a client travel and are counted, and R_i once a round, up. The
model that a client uses in the end is the whole one: the last broadcast is not cut.

The loss may use a row of E only if an example of the client names it. A penalty on all
of E belongs to the server (``mixed``). Accelerators that add the gradients of a table
in no fixed order repeat no run bit for bit, this one neither.

Where this differs from the paper: it leaves open how rows are asked for.

Reference: Charles, Bonawitz, Chiknavaryan, McMahan, Agüera y Arcas, "Federated select:
a primitive for communication- and memory-efficient federated learning", 2022,
arXiv:2208.09432.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from fedblend.checks import ALGORITHM, WHOLE, gate
from fedblend.compress.compressor import Encoded
from fedblend.core import Algorithm, PyTree, Ragged, Shard
from fedblend.data.federated import FEDERATED_DATA, FederatedData
from fedblend.shards import everything
from fedblend.transforms import sparse_rows as picking
from fedblend.transforms.compose import delta_of


@gate(algorithm=ALGORITHM, federated_data=FEDERATED_DATA, always=WHOLE)
def fedselect(
    algorithm: Algorithm,
    federated_data: FederatedData,
    *,
    rows: Mapping[str, Sequence[str]],
    always: int = 0,
) -> Algorithm:
    """The wrapped algorithm, with messages that hold the rows that a client uses.

    Args:
        algorithm: what to run, without states of clients; an encoding transform goes
            outermost, and only once.
        federated_data: whose clients take part; tells how many rows they use.
        rows: for the path of a parameter, such as "embedding" or "last/weight", the
            fields of the examples that hold numbers of its rows, by their paths ("0"
            and "1" are the inputs and the targets of a pair).
        always: rows from the first on that every client gets, whose numbers stay.
    """
    uses = {
        name: picking.used_rows(federated_data, fields, always)
        for name, fields in _grouped(rows).items()
    }
    return select_within(algorithm, uses, rows=rows, always=always)


def select_within(
    algorithm: Algorithm,
    most: Mapping[str, picking.Use],
    *,
    rows: Mapping[str, Sequence[str]],
    always: int = 0,
) -> Algorithm:
    """The same for clients whose examples are not here; other arguments as there.

    Args:
        algorithm: what to run.
        most: for the path of a parameter, bounds on what clients use of it.
        rows: which parameters are tables.
        always: rows from the first on that every client gets.
    """
    fields_of = _grouped(rows)
    uses = {group: most[name] for name, group in fields_of.items()}
    groups = list(uses)

    def asked(shard: Shard) -> tuple[Ragged, ...]:
        """The rows that a client uses, for each group of fields."""
        own = picking.named(everything(shard).rows)
        return tuple(
            picking.numbers_in([own[field] for field in group], use, always)
            for group, use in uses.items()
        )

    def by_name(wanted: Sequence[Ragged]) -> dict[str, Ragged]:
        return {n: wanted[groups.index(group)] for n, group in fields_of.items()}

    def enroll(params, shard, key):
        join, client = algorithm.enroll(params, shard, key)
        if jax.tree.leaves((join, client)):
            raise ValueError(
                "select: clients of the wrapped algorithm remember or say something "
                "of their own, for which they would need all rows"
            )
        return join, client

    def start(params, joins, central, key):
        for name, group in fields_of.items():
            _check_rows(params, name, uses[group].largest)
        return algorithm.start(params, joins, central, key)

    def tell(down, request):
        inner, wanted = request
        told = algorithm.tell(down, inner)
        if isinstance(told.correction, Encoded):
            raise ValueError("select: an encoded correction has no rows to pick")
        _refuse_tables(told.extra, told.shared, fields_of)
        shared, correction = (
            picking.at(by_name(wanted), picking.gather, tree)
            for tree in (told.shared, told.correction)
        )
        return told._replace(shared=shared, correction=correction)

    def client(down, client, shard, key):
        wanted, given = asked(shard), everything(shard).rows
        numbers = {
            field: ids
            for group, ids in zip(groups, wanted, strict=True)
            for field in group
        }
        examples = picking.at(numbers, picking.places, given)
        own = dataclasses.replace(
            shard, examples=examples, start=jnp.zeros_like(shard.start)
        )
        told = picking.named(down.shared, picking.is_picked)
        if not all(picking.is_picked(told[name]) for name in fields_of):
            raise ValueError("select: a transform around it tells clients whole tables")
        small = jax.tree.map(picking.opened, down, is_leaf=picking.is_picked)
        up, client = algorithm.client(small, client, own, key)
        _refuse_tables(up.extra, small.shared, fields_of)
        nudged = not set(fields_of).isdisjoint(picking.named(small.correction))
        if nudged and up.step_sum is None:
            raise ValueError(
                "select: clients of the wrapped algorithm do not take plain steps of "
                "one rate, so that how a correction moves the rows they lack is unknown"
            )
        found = _found(picking.named(given), picking.named(examples), numbers)
        delta = jax.tree.map(
            # Clients of another federation may use more rows: better nothing is heard.
            lambda leaf, told: picking.closed(jnp.where(found, leaf, jnp.nan), told),
            delta_of(up, "select"),
            down.shared,
        )
        extra = (up.extra, wanted, up.step_sum if nudged else ())
        return up._replace(
            delta=delta, mean_gradient=None, step_sum=None, extra=extra
        ), client

    def decode(up):
        extra, wanted, step_sum = up.extra
        own, delta = by_name(wanted), picking.named(up.delta, picking.is_picked)
        lack = tuple(
            picking.lacking(delta[name].shape[0], ids).astype(far.dtype) * far
            for name, ids in own.items()
            for far in jax.tree.leaves(step_sum)
        )
        whole = picking.at(own, picking.scatter, up.delta)
        inner = algorithm.decode(up._replace(delta=whole, extra=extra))
        return inner._replace(extra=(inner.extra, lack))

    def server(aggregate, down, server, central, key):
        extra, lack = aggregate.mean.extra
        correction = picking.named(down.correction)
        drift = {
            name: _by_row(far, correction[name])
            for name, far in zip(fields_of, lack, strict=bool(lack))
            if name in correction
        }
        delta = picking.at(drift, jnp.subtract, aggregate.mean.delta)
        aggregate = aggregate._replace(
            mean=aggregate.mean._replace(delta=delta, extra=extra)
        )
        return algorithm.server(aggregate, down, server, central, key)

    return algorithm._replace(
        enroll=enroll,
        start=start,
        client=client,
        server=server,
        ask=lambda client, shard: (algorithm.ask(client, shard), asked(shard)),
        tell=tell,
        decode=decode,
        # The median of rows that most clients lack is nothing.
        needs=algorithm.needs._replace(mean=True, whole=True),
    )


def _grouped(rows: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The fields of each parameter; a field can be renumbered in one way only."""
    if not rows:
        raise ValueError("select: rows names no parameter")
    group_of: dict[str, tuple[str, ...]] = {}
    for name, fields in rows.items():
        if isinstance(fields, str) or not fields:
            raise ValueError(
                f"select: rows of {name!r}: {fields!r} is no list of fields"
            )
        for field in fields:
            if group_of.setdefault(field, tuple(fields)) != tuple(fields):
                raise ValueError(
                    f"select: field {field!r} is among {group_of[field]} and among "
                    f"{tuple(fields)}; parameters that share a field share all"
                )
    return {name: tuple(fields) for name, fields in rows.items()}


def _check_rows(params: PyTree, name: str, largest: int) -> None:
    leaves = picking.named(params)
    if name not in leaves:
        raise ValueError(
            f"select: no parameter {name!r}, there are {', '.join(map(repr, leaves))}"
        )
    shape = leaves[name].shape
    if not shape or largest >= shape[0]:
        raise ValueError(
            f"select: the examples name row {largest} of {name!r}, whose shape is "
            f"{tuple(shape)}"
        )


def _refuse_tables(extra: PyTree, shared: PyTree, names: Mapping[str, object]) -> None:
    """Refuse what else is sent of a table, whose rows nobody would pick."""
    leaves = picking.named(shared)
    shapes = {leaves[name].shape for name in names}
    for leaf in jax.tree.leaves(extra):
        if leaf.shape in shapes:
            raise ValueError(
                "select: messages of the wrapped algorithm hold more than the model "
                f"and its correction: a table of shape {leaf.shape}"
            )


def _found(given, renumbered, numbers: Mapping[str, Ragged]) -> jax.Array:
    """Whether every number of the examples is among those asked for."""
    checks = [
        (ids.buffer[renumbered[field]] == given[field]).all()
        for field, ids in numbers.items()
    ]
    return jnp.stack(checks).all()


def _by_row(factors: jax.Array, table: jax.Array) -> jax.Array:
    spread = factors.reshape(-1, *(1,) * (table.ndim - 1))
    return spread.astype(table.dtype) * table
