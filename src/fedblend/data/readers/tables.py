# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Raw tables as columns: .csv, .tsv and .parquet files, frames, dicts of arrays.

A .gz or .zip file is a compressed .csv or .tsv.

pyarrow reads files, and frames that export Arrow data (polars and others). A column of
a pandas frame may hold values of several types. Texts stay texts here: what they mean
is up to ``data.preprocess``.
"""

import csv
import io
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedblend.data.dataset import (
    AbsentColumnError,
    DataError,
    MissingDataError,
    open_unpacked,
)
from fedblend.data.preprocess.schema import Columns
from fedblend.errors import hint
from fedblend.extras import require

FILES = (".csv", ".tsv", ".parquet", ".gz", ".zip")
"""The files that hold a table."""
_INDEX = re.compile(r"__index_level_\d+__")
_CODE = re.compile(r"0\d+")
_DELIMITERS = (";", "\t", "|")
_DAMAGE = (OSError, EOFError, UnicodeError, zlib.error, zipfile.BadZipFile)
_PROBED = 2**20
"""Bytes at the beginning of a CSV file that tell how it is written."""


class RawTable(NamedTuple):
    """A raw table."""

    columns: Columns
    where: str
    """Its path, or what it is."""
    name: str
    """In reports."""
    index: tuple[str, ...] = ()
    """The columns that are the index of a pandas table."""
    notes: tuple[str, ...] = ()
    array: bool = False
    """Whether it is an array, whose columns have no names."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def others(self, known: Sequence[str | None]) -> list[str]:
        """The columns that are inputs by default: all but these and pandas' index."""
        return [
            name
            for name in self.columns
            if name not in known and name not in self.index
        ]


def read_table(source: Any) -> RawTable:
    """The columns of a file, a data frame, or a dict of arrays.

    Raises:
        DataError: it cannot be read.
    """
    if isinstance(source, str | Path):
        return _read_file(Path(source))
    if isinstance(source, Mapping):
        columns = {str(name): column_of(values) for name, values in source.items()}
        found = RawTable(columns, "table", "table")
    elif type(source).__module__.startswith("pandas"):
        found = _read_pandas(source)
    elif hasattr(source, "__arrow_c_stream__") or hasattr(source, "column_names"):
        arrow = require("pyarrow", "a data frame").table(source)
        found = _read_arrow(arrow, "table", "table")
    elif isinstance(source, np.ndarray) and source.ndim == 2:
        columns = {f"x{place}": column_of(one) for place, one in enumerate(source.T)}
        found = RawTable(columns, "table", "table", array=True)
    else:
        raise DataError(
            f"data: a {type(source).__name__} is not a path, a data frame, a dict of "
            "columns or an array [rows, columns]"
        )
    lengths = {name: np.shape(column) for name, column in found.columns.items()}
    first = next(iter(lengths.values()), (0,))
    for name, shape in lengths.items():
        if shape != first or len(shape) != 1:
            raise DataError(
                f"data: column {name!r} has shape {shape}, the first {first}; columns "
                "need one value a row"
            )
    return found


def column_of(values: Any) -> np.ndarray:
    """An array or a list as a column; texts and mixed values are objects."""
    if not isinstance(values, np.ndarray) and hasattr(values, "to_numpy"):
        values = values.to_numpy()
    made = np.asarray(values) if isinstance(values, np.ndarray) else _collect(values)
    return made.astype(object) if made.dtype.kind in "US" else made


def _collect(values: Any) -> np.ndarray:
    values = list(values)
    kinds = {type(value) for value in values}
    if len(kinds) == 1 or kinds <= {int, float}:
        made = np.asarray(values)
        if made.ndim == 1:
            return made
    made = np.empty(len(values), object)
    made[:] = values
    return made


def _read_pandas(frame: Any) -> RawTable:
    names = [str(name) for name in frame.columns]
    _check_different(names, "table")
    columns = {}
    for place, name in enumerate(names):
        series = frame.iloc[:, place]
        plain = getattr(series.dtype, "kind", "O") in "biufmM"
        plain = plain and isinstance(series.dtype, np.dtype)
        columns[name] = (series if plain else series.astype(object)).to_numpy()
    return RawTable(columns, "table", "table")


def _read_file(path: Path) -> RawTable:
    if not path.exists():
        raise MissingDataError(f"{path}: no such file")
    pyarrow = require("pyarrow.lib", path.suffix[1:])
    notes: tuple[str, ...] = ()
    try:
        if path.suffix == ".parquet":
            table = require("pyarrow.parquet", "parquet").read_table(path)
        else:
            table, notes = _read_csv(path)
    except (pyarrow.ArrowException, *_DAMAGE) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read: {reason}") from None
    found = _read_arrow(table, str(path), table_name(path), notes)
    del table
    pyarrow.default_memory_pool().release_unused()
    return found


def table_name(path: Path) -> str:
    """The name of a file without what says how it is written.

    >>> table_name(Path("data/heart.csv.gz")), table_name(Path("v1.2.csv"))
    ('heart', 'v1.2')
    """
    return Path(path.stem).stem if path.suffix in (".gz", ".zip") else path.stem


def _read_csv(path: Path) -> tuple[Any, tuple[str, ...]]:
    """A CSV file, whatever separates its values and whatever its encoding."""
    reader = require("pyarrow.csv", "csv")
    with _open_unpacked(path) as file:
        first = file.read(_PROBED)
    encoding, notes = _encoding(first), []
    header = first.decode(encoding, "replace").partition("\n")[0]
    if encoding != "utf-8":
        notes.append(f"{path.name}: is not in UTF-8, and read as {encoding}")
    used = [one for one in _DELIMITERS if one in header]
    delimiter = used[0] if used and "," not in header else ","
    if delimiter != ",":
        notes.append(f"{path.name}: values are separated by {delimiter!r}")
    table = _parse_csv(
        path,
        _find_codes(first.decode(encoding, "replace"), delimiter),
        read_options=reader.ReadOptions(encoding=encoding),
        parse_options=reader.ParseOptions(
            delimiter=delimiter, newlines_in_values=b'"' in first
        ),
    )
    # Spreadsheets write empty columns at the end, and R a first one without a name.
    bare = [
        name.strip() or f"column {place}"
        for place, name in enumerate(table.column_names, 1)
    ]
    return table.rename_columns(bare), tuple(notes)


def _open_unpacked(path: Path) -> IO[bytes]:
    """A file for reading: the content of a .gz file, or the table in a .zip file."""
    if path.suffix != ".zip":
        return open_unpacked(path)
    members = zipfile.ZipFile(path)
    names = [one for one in members.namelist() if one.endswith((".csv", ".tsv"))]
    if len(names) != 1:
        raise DataError(f"{path}: has {len(names)} .csv or .tsv files, needs one")
    return members.open(names[0])


def _encoding(first: bytes) -> str:
    """The encoding of a file that begins so: UTF-8, UTF-16 with a mark, or Windows'."""
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    try:
        # The last character may be cut off.
        first[:-4].decode()
    except UnicodeDecodeError as error:
        return "utf-8" if error.start > len(first) - 9 else "cp1252"
    return "utf-8"


def _find_codes(first: str, delimiter: str) -> list[str]:
    r"""The columns of a file that begins so in which a whole number begins with 0.

    As numbers, the codes "01" and "1" would be the same.

    >>> _find_codes('ward,beds\n"01",12\n1,0\n', ",")
    ['ward']
    """
    codes = set()
    try:
        header, *rows = csv.reader(io.StringIO(first), delimiter=delimiter)
    except (csv.Error, ValueError):  # which pyarrow tells better
        return []
    whole = rows[:-1] if len(first) >= _PROBED else rows  # without one that is cut off
    for row in whole:
        codes |= {place for place, of in enumerate(row) if _CODE.fullmatch(of.strip())}
    return [name for place, name in enumerate(header) if place in codes]


def _parse_csv(path: Path, codes: Sequence[str], **options: Any) -> Any:
    """A CSV file; a column is text if its later values do not fit its first ones."""
    reader = require("pyarrow.csv", "csv")
    pyarrow = require("pyarrow.lib", "csv")
    texts: dict[str, Any] = dict.fromkeys(codes, pyarrow.string())
    while True:
        as_texts = reader.ConvertOptions(column_types=texts)
        try:
            with _open_unpacked(path) as file:
                return reader.read_csv(file, convert_options=as_texts, **options)
        except pyarrow.ArrowInvalid as error:
            place = re.match(r"In CSV column #(\d+): CSV conversion error", str(error))
            if place is None:
                raise
            with (
                _open_unpacked(path) as file,
                reader.open_csv(file, **options) as opened,
            ):
                name = opened.schema.names[int(place[1])]
            if name in texts:
                raise
            texts[name] = pyarrow.string()


def _read_arrow(
    table: Any, where: str, name: str, notes: tuple[str, ...] = ()
) -> RawTable:
    _check_different(table.column_names, where)
    columns = {one: _convert_arrow(table.column(one)) for one in table.column_names}
    try:
        about = table.schema.pandas_metadata or {}
    except ValueError:  # pandas did not write this file
        about = {}
    index = [one for one in about.get("index_columns", ()) if isinstance(one, str)]
    index += [one for one in table.column_names if _INDEX.fullmatch(one)]
    return RawTable(columns, where, name, tuple(dict.fromkeys(index)), notes)


def _convert_arrow(column: Any) -> np.ndarray:
    kind = str(column.type)
    if kind.startswith("dictionary"):
        return _collect(column.to_pylist())
    if kind == "string_view":
        column = column.cast("string")
    if str(column.type) in ("string", "large_string"):
        # Rows of equal texts share one object: a tenth of the memory.
        whole = column.combine_chunks().dictionary_encode()
        texts = np.array([*whole.dictionary.to_pylist(), None], object)
        return texts[whole.indices.fill_null(len(texts) - 1).to_numpy()]
    made = column.to_numpy()
    if kind in ("binary", "large_binary"):  # a CSV that is not in UTF-8
        made = np.array(
            [None if one is None else one.decode("cp1252", "replace") for one in made],
            object,
        )
    return made


def _check_different(names: Sequence[str], where: str) -> None:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise DataError(f"{where}: the column {twice[0]!r} occurs more than once")


def check_names(
    wanted: Sequence[str], names: Sequence[str], kind: str, where: str | Path
) -> None:
    """Refuse the name of a column or array that a source does not have."""
    known = set(names)
    for name in wanted:
        if name not in known:
            raise AbsentColumnError(
                name,
                f"{where}: there is no {kind} {name!r}; there are "
                f"{', '.join(names) or 'none'}",
            )


def drop_columns(
    table: RawTable, drop: Sequence[str], known: Sequence[Any], inputs: Sequence[str]
) -> RawTable:
    """The table without these columns; ``known`` are the target and the client."""
    for name in drop:
        if name not in table.columns:
            raise AbsentColumnError(
                name,
                f"{table.where}: drop: there is no column {name!r}; "
                f"{hint(name, table.columns)}",
            )
        if name in known:
            raise DataError(f"{table.where}: drop: {name!r} is the target or client")
        if name in inputs:
            raise DataError(f"{table.where}: drop: {name!r} is one of the inputs")
    kept = {name: one for name, one in table.columns.items() if name not in drop}
    return table._replace(columns=kept)


def complete_numbers(columns: Columns) -> bool:
    """Whether all columns hold numbers, or texts of numbers, and none is missing."""
    return all(
        (raw.dtype.kind in "biu")
        or (raw.dtype.kind == "f" and not np.isnan(raw).any())
        or (
            raw.dtype.kind == "O"
            and _first_other(raw) is None
            and not np.isnan(raw.astype(np.float64)).any()
        )
        for raw in columns.values()
    )


def stack_numbers(columns: Columns, where: str) -> np.ndarray:
    """Columns of numbers as float32 [rows, columns], NaN where a value is missing.

    Raises:
        DataError: a column has something else, or there are no rows.
    """
    numbers = []
    for name, raw in columns.items():
        if not len(raw):
            raise DataError(f"{where}: there are no rows")
        row = _first_other(raw)
        if row is not None:
            raise DataError(
                f"{where}: column {name!r} is not numeric: row {row} (counted from "
                f"0) is {_plain(raw[row])!r:.40}; choose the numeric ones with inputs"
            )
        with np.errstate(over="ignore"):  # too large becomes inf, and is reported
            numbers.append(raw.astype(np.float64).astype(np.float32))
    return np.stack(numbers, axis=1)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _first_other(raw: np.ndarray) -> int | None:
    """The first row that is no number, nor a text of one."""
    if raw.dtype.kind in "biuf":
        return None
    if raw.dtype.kind != "O":
        return 0
    for row, value in enumerate(raw.tolist()):
        try:
            float(value)
        except (TypeError, ValueError):
            return row
    return None
