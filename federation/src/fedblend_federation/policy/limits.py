# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether an experiment asks for too much, or for updates of too few rows.

Everything here follows from a configuration, shapes and numbers of rows: it is checked
before rows are read, memory is allocated or anything is compiled. What a batch of few
rows reveals is exact: a step on one row is that row, times a number.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import floor, prod
from typing import Any

import numpy as np

from fedblend import trees
from fedblend.config.config import Config
from fedblend.config.table import Table
from fedblend.config.tables.local_work import LocalWork, ScheduleTable
from fedblend.data.preprocess.preprocessing import BINS
from fedblend.local import MOST_ORDERED
from fedblend.simulation.devices import bytes_of
from fedblend_federation.contract import Contract
from fedblend_federation.policy.policy import Accept, Limits, Policy, refusal_line

REPEATED = (
    *("steps", "epochs", "inner_steps", "head_steps", "adapt_steps"),
    *("grid", "turns", "most"),
)
"""Options that say how often something is computed."""
PARTS = ("held_out", "validation")
"""Options that set apart a fraction of the training rows."""
STEPS, LAYERS, CLIENTS = FIXED = 10_000, 100, 10_000
"""Most of any count of an algorithm, of layers, and of clients of a federation."""
COPIES = 12
"""Copies of the parameters that a node has in memory at once: states, gradients,
optimizers, messages."""


def too_large(limits: Limits, contract: Contract) -> str | None:
    """Why an experiment is too large, in one line, or None; before rows are read."""
    for most, where, value in _sizes(limits, contract):
        if value > most:
            key = "limits" if most in FIXED else "limits.memory_gb"
            return refusal_line(key, where, value, f"at most {most}")
    return None


def _sizes(limits: Limits, contract: Contract) -> Iterator[tuple[int, str, int]]:
    """A limit, and where what number stands; what takes time comes last."""
    config, model = contract.config, contract.config.model
    for where, value in _numbers(config.algorithm, "algorithm"):
        rows = where.endswith(".batch_size")
        yield limits.batch_rows if rows else STEPS, where, value
    for where, value in (
        _numbers(config.compress, "compress") if config.compress else ()
    ):
        yield limits.parameters, where, value
    if config.central is not None:
        yield limits.batch_rows, "central.batch_size", config.central.batch_size or 0
    yield CLIENTS, "data.clients", contract.clients
    yield LAYERS, "model.layers", getattr(model, "layers", 0)
    for where, value in (*dict(model).items(), ("shape", contract.nodes.shape)):
        yield LAYERS, where, len(value) if isinstance(value, list) else 0
    yield limits.parameters, "parameters of the base", trees.size(contract.base)
    yield limits.parameters, "parameters of the model", parameters(contract)


def terms_too_large(
    limits: Limits, contract: Contract, terms: Mapping[str, Any], clients: int = 1
) -> str | None:
    """Why the terms of an experiment are too large; before anything is allocated.

    ``clients`` are those of the node, whose rows are in memory at once.
    """
    given = terms.get("capacities")
    sizes = list(given.values()) if isinstance(given, dict) else []
    if not sizes or not all(type(size) is int for size in sizes):
        return None  # the contract says what is wrong with them
    capacity, most = max(sizes), limits.capacity_rows
    if capacity > most:
        return refusal_line(
            "limits.memory_gb", "capacities", capacity, f"at most {most}"
        )
    cost, allowed = operations(contract, capacity), f"at most {limits.operations:.1e}"
    if cost > limits.operations:
        return refusal_line("limits.seconds", "a round", f"{cost:.1e}", allowed)
    return memory_refusal(limits, _memory(contract, sizes, clients), "an experiment")


def memory_refusal(limits: Limits, needed: float, where: str) -> str | None:
    """Why so many bytes are too many, or None."""
    if needed <= limits.memory_gb * 1e9:
        return None
    found, most = f"{needed / 1e9:.2f} GB", f"at most {limits.memory_gb:g} GB"
    return refusal_line("limits.memory_gb", where, found, most)


def activations(contract: Contract, capacities: Mapping[str, int]) -> float:
    """Bytes, about, between the layers of the model in a step, or in a measurement.

    A gradient keeps what its backward pass reads, and makes as much again.
    """
    works = [work.rows() for _, work in _works(contract.config)]
    train = max(rows or capacities["train"] for rows in works or [None])
    return float(max(2 * train, *capacities.values()) * contract.activation_bytes)


def too_small(accept: Accept, config: Config) -> str | None:
    """Why updates are made of too few rows, as far as a configuration says so."""
    least, whole = accept.min_batch_rows, accept.fewest_rows
    for where, work in _works(config):
        size = work.rows()
        if size is not None and size < least:
            return refusal_line(
                "accept.min_batch_rows", f"{where}.batch_size", size, _minimum(least)
            )
        if size is None or work.steps is None:
            continue
        fewest = min(work.steps) if isinstance(work.steps, list) else work.steps
        if work.schedule is not None and work.schedule.unit == "step":
            fewest = 1  # a rate that falls at once leaves nothing of later steps
        if fewest * size < whole:
            return refusal_line(
                "accept.fewest_rows",
                f"{where}.steps times batch_size",
                fewest * size,
                _minimum(whole),
            )
    return None


def too_few_values(
    accept: Accept, present: Sequence[float], rows: int, *, ranks: bool = False
) -> str | None:
    """Why means of columns with few values stay on the node, or None.

    Args:
        accept: of the policy.
        present: the fraction of rows with a value, of every column.
        rows: the number of rows.
        ranks: whether quantiles are sent, too, which divide them into bins.
    """
    least = accept.min_part_rows * (BINS if ranks else 1)
    if not any(0 < round(share * rows) < least for share in present):
        return None
    where = "rows with a value in a column of data.raw"
    return refusal_line("accept.min_batch_rows", where, "fewer", _minimum(least))


def too_small_for(policy: Policy, contract: Contract, rows: int) -> str | None:
    """Why updates are made of too few of a node's training rows, or None.

    The server knows the number of rows: two requests whose batches or parts differ in
    one row would reveal that row by their difference. Second derivatives of fewer rows
    than parameters reveal the space of these rows, unless they have noise.
    """
    accept, config = policy.accept, contract.config
    least, where = accept.fewest_rows, "training rows"
    bare = "hessian" in config.algorithm.entry.sends and not policy.protect.rows.noise
    if least and bare:
        least = max(least, parameters(contract))
        where = "training rows for second derivatives"
    if rows < least:
        return refusal_line("accept.fewest_rows", where, "fewer", _minimum(least))
    left = rows
    for where, fraction in _parts(config).items():
        held = floor(fraction * rows)
        left = min(left, rows - held)
        if 0 < held < accept.min_part_rows or rows - held < accept.min_batch_rows:
            allowed = (
                f"0, or parts of at least {accept.min_part_rows} and "
                f"{accept.min_batch_rows} rows"
            )
            return refusal_line(
                "accept.min_batch_rows", where, f"{fraction:g}", allowed
            )
    for where, work in _works(config):
        size = work.rows()
        for count in {left, rows} if size is not None and work.epochs else ():
            last = count % size if size is not None else 0
            if 0 < last < accept.min_batch_rows:
                return refusal_line(
                    "accept.min_batch_rows",
                    f"{where}.batch_size: the last batch of an epoch",
                    last,
                    _minimum(accept.min_batch_rows),
                )
    return None


def parameters(contract: Contract) -> int:
    """The number of parameters of the model, those of a frozen base among them."""
    return trees.size((contract.params, contract.base))


def operations(contract: Contract, capacity: int) -> float:
    """Parameters times rows that a round, or enrollment, computes with, at most."""
    total = 0.0
    for _, table in _tables(contract.config.algorithm, "algorithm"):
        rows = capacity
        size = table.rows() if isinstance(table, LocalWork) else None
        if size is not None and getattr(table, "epochs", None) is None:
            rows = size
        times = (_largest(getattr(table, name, None)) for name in REPEATED)
        total += prod(times) * float(rows)
    return total * parameters(contract)


def parts_of(config: Config) -> dict[str, float]:
    """The fractions of training rows that the algorithm sets apart, by key."""
    return {key: part for key, part in _parts(config).items() if part}


def _parts(config: Config) -> dict[str, float]:
    return {
        f"{where}.{key}": value
        for where, table in _tables(config.algorithm, "algorithm")
        for key, value in table
        if key in PARTS and isinstance(value, float)
    }


def _memory(contract: Contract, capacities: list[int], clients: int) -> float:
    """Bytes, at least: padded rows and a copy, parameters, the order of epochs."""
    epochs = [_largest(work.epochs) for _, work in _works(contract.config)]
    orders = min(max(epochs) * max(capacities), MOST_ORDERED)
    width = np.dtype(contract.config.run.precision).itemsize
    copies = float(width * COPIES * trees.size(contract.params))
    copies += float(width * trees.size(contract.base))  # which nobody changes
    rows = 2.0 * bytes_of(contract.row) * sum(capacities) * clients
    return rows + copies + 4.0 * orders


def _tables(table: Table, where: str) -> Iterator[tuple[str, Table]]:
    """A table and those in it, with the keys where they stand."""
    yield where, table
    for key, value in table:
        if isinstance(value, Table):
            yield from _tables(value, f"{where}.{key}")


def _numbers(table: Table, where: str) -> Iterator[tuple[str, int]]:
    """All whole numbers of a table and those in it, the largest of a list."""
    for inside, own in _tables(table, where):
        # A rate over many steps costs no more than one over few.
        for key, value in () if isinstance(own, ScheduleTable) else own:
            if _largest(value) > 1:
                yield f"{inside}.{key}", _largest(value)


def _works(config: Config) -> Iterator[tuple[str, LocalWork]]:
    """The local work of the algorithm and of the tables in it."""
    for where, table in _tables(config.algorithm, "algorithm"):
        if isinstance(table, LocalWork):
            yield where, table


def _largest(value: Any) -> int:
    """The largest of whole numbers; 1 for anything else."""
    several = value if isinstance(value, list) else [value]
    return max([1, *(number for number in several if type(number) is int)])


def _minimum(number: int) -> str:
    return f"at least {number}"
