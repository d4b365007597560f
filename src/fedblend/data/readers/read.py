# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Your own data: a table, or arrays (.npz).

A table (a .csv, .tsv or .parquet file, a data frame, a dict of columns) has one
column for the target, one for the client of a row, and inputs in the others: numbers,
truth values, categories, dates, any of them missing. An .npz file holds the arrays
``inputs``, ``targets`` and ``clients``.

``read`` reads a dataset. ``read_new_rows`` and ``read_inputs`` read rows for a model
that is trained already: they must have the columns or the shape that the model was
trained on and no class that it does not know, and may all be of one class.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedblend.data.dataset import (
    DataError,
    Dataset,
    Kind,
    MissingDataError,
    Task,
    check,
    check_kind,
    check_rows,
)
from fedblend.data.preprocess.columns import identify
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.data.preprocess.schema import Choice, Schema, schema_of
from fedblend.data.readers.arrays import Raw, read_npz
from fedblend.data.readers.tables import (
    FILES,
    RawTable,
    check_names,
    column_of,
    complete_numbers,
    drop_columns,
    read_table,
    stack_numbers,
)
from fedblend.data.readers.targets import label_rows, make_dataset, targets_of

Preprocess = Literal["auto", "always", "none"] | Mapping[str, Choice]
"""What is preprocessed: tables, but not arrays; both; or nothing. Or both, with choices
for some columns."""


def read(
    source: Any,
    *,
    target: Any = None,
    client: Any = None,
    inputs: str | Sequence[str] | None = None,
    drop: Sequence[str] = (),
    kind: Kind | None = None,
    log_shift: float | None = None,
    preprocess: Preprocess = "auto",
    time: str | None = None,
    group: str | None = None,
) -> Dataset:
    """Read a dataset of your own, and check it.

    Args:
        source: a .csv, .tsv, .parquet or .npz file, a pandas or polars frame,
            a dict of columns, or an array [rows, columns].
        target: the column (must be given) or array ("targets") of the target; or the
            targets themselves.
        client: the column or array ("clients", if there) of the client of each row; or
            the clients themselves.
        inputs: the columns (all others by default) or the array ("inputs") of inputs.
        drop: columns of a table that are no inputs.
        kind: "classes", "binary", "regression" or "counts". By default real numbers are
            regression, unless they are 0.0 and 1.0 or -1.0 and 1.0; those and two
            different integers or texts are binary, more are classes. More than ten
            different integers in a table are regression.
        log_shift: of a regression: targets are the logarithms of the numbers plus this,
            and predictions are in the unit of the numbers again.
        preprocess: "auto": a table is preprocessed when its rows are split, arrays are
            used as they are; "always": arrays [rows, columns] are preprocessed, too;
            "none": numbers are used as they are, and a table with anything else is
            refused. Or what to make of some columns, such as ``{"age": "standardize",
            "grade": ["low", "high"], "weight": "missing 0 999"}``.
        time: the column of numbers or dates that says when a row of a table was; each
            client's last rows are then held out.
        group: the column that says which rows of a table belong together, such as those
            of a patient; they are then held out together. It is no input.
    """
    check_kind(kind)
    if time is not None and group is not None:
        raise DataError("time and group: choose one; rows are held out by one of them")
    if not isinstance(preprocess, Mapping) and preprocess not in _WHEN:
        raise DataError(
            f"preprocess: {preprocess!r} is not one of {', '.join(_WHEN)}, or a table "
            "of choices"
        )
    table = _table(source)
    if table is None:
        path = Path(source)
        for key, given in {"drop": drop, "time": time, "group": group}.items():
            if given:
                raise DataError(f"{path}: {key}: needs a table; arrays have no columns")
        raw = _read_arrays(path, target, client, inputs)
        if preprocess in ("auto", "none"):
            dataset = make_dataset(raw, kind, str(path), path.stem, log_shift)
        else:
            table = read_table(raw.inputs)._replace(where=str(path), name=path.stem)
            target, client, inputs = raw.targets, raw.keys, None
    if table is not None:
        chosen = [inputs] if isinstance(inputs, str) else inputs
        parts = _split_columns(table, {"time": time, "group": group}, (target, client))
        drop = [*dict.fromkeys([*drop, *([group] if group else [])])]
        table = drop_columns(table, drop, (target, client), chosen or ())
        raw = _raw(table, target, client, chosen, preprocess, parts)
        dataset = make_dataset(raw, kind, table.where, table.name, log_shift)
    check(dataset)
    return dataset


_WHEN = ("auto", "always", "none")


def _split_columns(
    table: RawTable, named: Mapping[str, str | None], known: Sequence[Any]
) -> dict[str, np.ndarray]:
    """The columns that say how to split rows, which may well be no inputs."""
    found = {use: one for use, one in named.items() if one is not None}
    check_names([*found.values()], [*table.columns], "column", table.where)
    for use, one in found.items():
        if one in known:
            raise DataError(f"{table.where}: {use}: {one!r} is the target or client")
    return {use: table.columns[one] for use, one in found.items()}


def read_new_rows(
    source: Any,
    task: Task,
    *,
    target: Any = None,
    client: Any = None,
    inputs: str | None = None,
    preprocessing: Preprocessing | Schema | None = None,
) -> Dataset:
    """Read rows for a known task, and check that they fit.

    Args:
        source: as of ``read``.
        task: what the model was trained for.
        target: the column (must be given) or array ("targets") of the target.
        client: the column or array (by default "clients", if there) of the client of
            each row; without it all rows belong to one client.
        inputs: the array ("inputs") of inputs; those of a table are the task's.
        preprocessing: of the table that the model was trained on; the inputs of the
            rows are then those of the model. With a schema they are columns as it
            encodes them.
    """
    table = _table(source)
    if table is None:
        where, name = str(source), Path(source).stem
        raw = _read_arrays(Path(source), target, client, inputs)
    else:
        where, name = table.where, table.name
        raw = _raw(table, target, client, list(task.columns) or None, preprocessing)
    schema = preprocessing if isinstance(preprocessing, Schema) else None
    flat, rows = table is not None, raw.inputs
    rows = rows if schema is not None else _reshape(rows, task, where, flat=flat)
    if task.kind == "sequence":
        rows = rows.astype(np.int32)
    dataset = Dataset(
        (rows, targets_of(raw.targets, task, where)),
        task.kind,
        task.outputs,
        keys=raw.keys,
        name=name,
        label_names=task.labels,
        columns=raw.columns,
        notes=raw.notes,
        schema=schema,
    )
    check_rows(dataset, dataset.rows, dataset.keys, where)
    return dataset


def read_inputs(
    source: Any,
    task: Task,
    *,
    inputs: str | None = None,
    others: Sequence[str] = (),
    preprocessing: Preprocessing | None = None,
) -> np.ndarray:
    """Read the inputs of rows without targets, to predict.

    Args:
        source: a .csv, .parquet or .npz file, or a table in memory.
        task: what the model was trained for.
        inputs: the array ("inputs") of an .npz; those of a table are the task's.
        others: columns of a table that are no inputs, where the task names no columns.
        preprocessing: of the table that the model was trained on.
    """
    table = _table(source)
    if table is None:
        where, path = str(source), Path(source)
        rows = read_npz(path, inputs or "inputs", None, None).inputs
    elif preprocessing is not None:
        where, rows = table.where, _transform(preprocessing, table)
    else:
        where, rows = table.where, _columns(table, list(task.columns) or None, others)
    rows = _reshape(rows, task, where, flat=table is not None)
    if not np.isfinite(rows).all():
        row = int(np.flatnonzero(~np.isfinite(rows.reshape(len(rows), -1)).all(1))[0])
        raise DataError(f"{where}: row {row} (counted from 0) is not finite")
    return rows


def read_raw(
    path: Path,
    target: str | None,
    client: str | None,
    inputs: str | Sequence[str] | None,
    preprocess: Preprocess = "none",
) -> Raw:
    """The inputs of a file, with the targets as stored."""
    table = _table(path)
    if table is None:
        return _read_arrays(path, target, client, inputs)
    chosen = [inputs] if isinstance(inputs, str) else inputs
    return _raw(table, target, client, chosen, preprocess)


def _table(source: Any) -> RawTable | None:
    """The columns of a source; None of one that holds arrays."""
    if not isinstance(source, str | Path):
        return read_table(source)
    path = Path(source)
    if not path.exists():
        raise MissingDataError(f"{path}: no such file")
    if path.suffix == ".npz":
        return None
    if path.suffix in FILES:
        return read_table(path)
    raise DataError(
        f"{path}: cannot read {path.suffix or 'a file without suffix'}; allowed are "
        f"{', '.join(FILES)} and .npz"
        + ("; save the sheet as .csv" if path.suffix in (".xlsx", ".xls") else "")
    )


def _read_arrays(path: Path, target: Any, client: Any, inputs: Any) -> Raw:
    for name, value in (("inputs", inputs), ("target", target), ("client", client)):
        if value is not None and not isinstance(value, str):
            raise DataError(f"{path}: {name}: name one array, not a list")
    return read_npz(path, inputs or "inputs", target or "targets", client)


def _raw(
    table: RawTable,
    target: Any,
    client: Any,
    inputs: Sequence[str] | None,
    preprocess: Preprocess | Preprocessing | Schema | None,
    parts: Mapping[str, Any] | None = None,
) -> Raw:
    """The rows of a table that have a target and a client, with encoded inputs."""
    names = list(table.columns)
    if target is None:
        raise DataError(
            f"{table.where}: target: name one of the columns {', '.join(names)}"
        )
    known = [one for one in (target, client) if isinstance(one, str)]
    notes, confirmed = list(table.notes), inputs is not None
    if inputs is None:
        inputs = table.others(known)
        used = {*inputs, *known}
        left = [name for name in names if name not in used]
        if left:
            notes.append(
                f"{Path(table.where).name}: left out {', '.join(map(repr, left))}, the "
                "index of a pandas table; named in inputs it is one of them"
            )
    check_names([*known, *inputs], names, "column", table.where)
    if isinstance(target, str) and target in (client, *inputs):
        if target == client:
            raise DataError(
                f"{table.where}: client: {target!r} is the target, too; name the "
                "column that says whose row it is, and another one to predict"
            )
        raise DataError(f"{table.where}: inputs: {target!r} is the target")
    if not inputs:
        raise DataError(
            f"{table.where}: inputs: need at least one column, other than the target"
        )
    strict = preprocess in ("none", None)
    named = {"target": target, "client": client, **(parts or {})}
    found, kept, left_out = label_rows(table, named, strict=strict)
    columns = {name: table.columns[name][kept] for name in inputs}
    some = table._replace(columns=columns)
    raw = Raw(
        np.empty(0),
        found["target"],
        found.get("client"),
        tuple(inputs),
        (*notes, *left_out),
        time=_moments(found["time"], table.where) if "time" in found else None,
        groups=found.get("group"),
    )
    if isinstance(preprocess, Preprocessing):
        return raw._replace(inputs=_transform(preprocess, some))
    if isinstance(preprocess, Schema):
        return raw._replace(inputs=preprocess.encode(some.columns))
    return _encode(raw, some, preprocess, confirmed)


def _moments(labels: np.ndarray, where: str) -> np.ndarray:
    """The column that says when rows were, as numbers."""
    seen = identify(column_of(labels))
    if seen.kind not in ("number", "boolean", "date") or np.isnan(seen.numbers).any():
        odd = labels[np.isnan(seen.numbers)] if seen.kind != "text" else labels
        raise DataError(f"{where}: time: {odd[0]!s:.40} is no number and no date")
    return seen.numbers


def _encode(
    raw: Raw, table: RawTable, preprocess: Preprocess | None, confirmed: bool
) -> Raw:
    """The inputs as numbers, or as a schema of the table encodes them."""
    array = table.array and complete_numbers(table.columns)
    if preprocess in ("none", None) or (preprocess == "auto" and array):
        return raw._replace(inputs=stack_numbers(table.columns, table.where))
    if not table.rows:
        raise DataError(f"{table.where}: there are no rows")
    choices = preprocess if isinstance(preprocess, Mapping) else None
    schema = schema_of(table.columns, choices, confirmed=confirmed)
    return raw._replace(
        inputs=schema.encode(table.columns), columns=schema.names, schema=schema
    )


def _columns(
    table: RawTable, inputs: Sequence[str] | None, others: Sequence[str]
) -> np.ndarray:
    """The numbers of a table that need not have a target; all columns but others."""
    chosen = inputs or table.others(others)
    check_names(chosen, list(table.columns), "column", table.where)
    return stack_numbers({name: table.columns[name] for name in chosen}, table.where)


def _transform(preprocessing: Preprocessing, table: RawTable) -> np.ndarray:
    """The inputs that a preprocessing makes of a table."""
    check_names(preprocessing.columns, list(table.columns), "column", table.where)
    return preprocessing.transform(table.columns)


def _reshape(rows: np.ndarray, task: Task, where: str, *, flat: bool) -> np.ndarray:
    """Rows in the shape of the task; those of a table may be flat."""
    size = np.prod(task.shape, dtype=int)
    if flat and not task.columns and np.prod(rows.shape[1:], dtype=int) == size:
        rows = rows.reshape(len(rows), *task.shape)
    if rows.shape[1:] != task.shape:
        raise DataError(
            f"{where}: inputs of shape {rows.shape[1:]}, but the model was trained on "
            f"{task.shape}"
        )
    return rows
