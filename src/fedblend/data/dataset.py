# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A dataset before it is divided among clients: its registration and its checks.

A dataset by name is declared once, beside its loader::

    @dataset("Handwritten digits, 8 x 8", Size(rows=1797, classes=10), "CC BY 4.0")
    def digits() -> Dataset: ...

Its options are the loader's parameters; ``DATASETS`` imports every module of
``data.datasets`` when it is first read, and those of other distributions that have an
entry point of the group ``fedblend.datasets``.

Images are float32 in [0, 1], four bytes per pixel: MNIST takes 220 MB, all of CIFAR-10
740 MB, and federated data is one copy.
"""

import bz2
import gzip
import hashlib
import inspect
import lzma
import math
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import (
    IO,
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    cast,
    get_args,
)

import numpy as np

from fedblend.errors import InputError, hint
from fedblend.registry import Registry

if TYPE_CHECKING:
    from fedblend.data.preprocess.schema import Schema

Loader = TypeVar("Loader", bound="Callable[..., Dataset]")

Kind = Literal["classes", "binary", "regression", "counts", "sequence", "tags"]
"""What the targets are: class numbers; 0 or 1; real numbers; whole numbers from 0 on,
of which models predict the logarithm of the mean; the next class at each place of a
sequence of classes (negative where it does not count); or ones and zeros over labels,
of which a row may have several."""
NUMBERS = ("regression", "counts")
"""Kinds of targets whose predictions are numbers."""

Rows = tuple[np.ndarray, np.ndarray]
"""Inputs and targets, one entry of each for every row."""


_MALFORMED = (LookupError, TypeError, ValueError, RuntimeError, SyntaxError)
_BROKEN_OFF = (OSError, EOFError, zlib.error, lzma.LZMAError)
_NO_ARCHIVE = (tarfile.TarError, zipfile.BadZipFile)
_OPENERS = {".xz": lzma.open, ".bz2": bz2.open, ".gz": gzip.open}


class DataError(InputError):
    """Data, or a request for data, that cannot be used: one line."""


class MissingDataError(DataError, FileNotFoundError):
    """A file or folder that should hold data is not there."""


class AbsentColumnError(DataError):
    """A column or array that does not exist; ``name`` is its name."""

    def __init__(self, name: str, text: str):
        super().__init__(text)
        self.name = name


class Dataset(NamedTuple):
    """All rows of a dataset, with the client of each row where the data names it."""

    rows: Rows
    """``(inputs[rows, ...], targets[rows, ...])``."""
    kind: Kind
    """What the targets are."""
    outputs: int
    """Scores a model gives: classes or labels, 1 for binary, the target's width."""
    test_rows: Rows | None = None
    """The official test set."""
    keys: np.ndarray | None = None
    """The natural client of each row: strings or integers."""
    test_keys: np.ndarray | None = None
    """The natural client of each test row."""
    name: str = ""
    """Its name in reports."""
    label_names: tuple[str, ...] = ()
    """The names of the classes, by number."""
    columns: tuple[str, ...] = ()
    """The names of the inputs, where they came as a table."""
    notes: tuple[str, ...] = ()
    """Decisions that the reader made, for the owner of the data to check."""
    schema: "Schema | None" = None
    """Of a raw table: inputs are its columns as encoded by the schema, NaN where a
    value is missing, and become those of a model after rows are split."""
    log_shift: float | None = None
    """Targets are logarithms of the table's numbers plus this; None if as they came."""
    time: np.ndarray | None = None
    """When each row was, in any unit: a client's last rows are held out."""
    groups: np.ndarray | None = None
    """Which rows belong together, such as those of a patient: held out together."""
    sha256: str = ""
    """Of rows in a folder, which stay in its files and belong to its clients."""


class Task(NamedTuple):
    """What a model is trained for: the shape of rows, and the meaning of targets."""

    kind: Kind
    outputs: int
    """Number of scores that a model computes for a row."""
    shape: tuple[int, ...]
    """The shape of one row's inputs."""
    labels: tuple[str, ...] = ()
    """The names of the classes, by number."""
    columns: tuple[str, ...] = ()
    """The names of the inputs, where they are columns of a table."""
    center: float = 0.0
    """What is added to outputs for numbers: in the unit of the targets of a regression,
    about the logarithm of the mean of counts."""
    scale: float = 1.0
    """What they are multiplied with before; the training loss is in this unit."""
    log_shift: float | None = None
    """Predictions are exp(outputs) less this, and targets of a regression log(number +
    this); None where outputs are predictions."""
    ranks: int = 0
    """How many of the last inputs are ranks of numbers, in bins between quantiles."""

    @property
    def loss_unit(self) -> float:
        """What the training loss is divided by."""
        return math.exp(self.center) if self.kind == "counts" else self.scale**2

    @property
    def exp_shift(self) -> float | None:
        """Predictions are exp(outputs) less this; None where they are the outputs."""
        return 0.0 if self.kind == "counts" else self.log_shift

    def change_unit(self, targets: np.ndarray) -> np.ndarray:
        """Targets that are numbers in the unit of models, before ``center``."""
        if self.kind == "counts":
            return targets / math.exp(self.center)
        return (targets - self.center) / self.scale

    def restore_unit(self, outputs: np.ndarray) -> np.ndarray:
        """Outputs for numbers as predictions in the unit of the user's table."""
        if self.exp_shift is None:
            return outputs
        with np.errstate(over="ignore"):
            return np.exp(outputs) - outputs.dtype.type(self.exp_shift)


def task_of(dataset: Dataset) -> Task:
    """The task of a dataset."""
    shape = dataset.rows[0].shape[1:]
    unit: dict[str, float | None] = {"log_shift": dataset.log_shift}
    if dataset.schema is not None:
        shape, unit["ranks"] = (dataset.schema.width,), len(dataset.schema.ranked)
        one_number = dataset.kind == "regression" and dataset.outputs == 1
        unit |= _unit(dataset.rows[1]) if one_number else {}
    if dataset.kind == "counts":
        mean = float(dataset.rows[1].astype(np.float64).mean())
        unit["center"] = round(4 * math.log(mean)) / 4
    names = dataset.label_names, dataset.columns
    return Task(dataset.kind, dataset.outputs, shape, *names)._replace(**unit)


def _unit(targets: np.ndarray) -> dict[str, float]:
    """Center and scale of the numbers that a raw table has as targets.

    These are known before rows are split, so both are rounded: the scale to a power of
    two near the deviation, which divides without error, the center to a quarter of it.
    """
    values = targets.astype(np.float64)
    deviation = values.std()
    if not deviation > 0:
        return {"center": float(values.mean())}
    scale = 2.0 ** np.round(np.log2(deviation))
    return {
        "center": float(np.round(4 * values.mean() / scale) / 4 * scale) + 0.0,
        "scale": float(scale),
    }


class Size(NamedTuple):
    """The size of a dataset; None where options decide, or there is no such thing."""

    rows: int | None = None
    """Training rows."""
    test_rows: int | None = None
    """Rows of the official test set."""
    classes: int | None = None
    """None for regression."""
    clients: int | None = None
    """Natural clients."""


class PublicFiles(Protocol):
    """Files of a dataset that are downloaded, or put in place by hand."""

    @property
    def name(self) -> str:
        """By which ``fedblend data get`` finds them."""
        ...

    @property
    def usable(self) -> bool:
        """Whether a loader can read them."""
        ...

    @property
    def instruction(self) -> str:
        """How to obtain files that cannot be downloaded; else empty."""
        ...

    def describe(self) -> list[str]:
        """Where each file is, and how to get what is missing."""
        ...

    def get(
        self, progress: Callable[[int, int | None], None], base: str | None
    ) -> list[Path]:
        """Download what is missing, from a mirror ``base`` if given, and check all."""
        ...


class DatasetInfo(NamedTuple):
    """What is known of a dataset before it is loaded."""

    name: str
    load: Callable[..., Dataset]
    summary: str
    size: Size
    license: str
    """The terms of use, and what to cite."""
    needs: tuple[PublicFiles, ...]
    """The files that the loader reads."""
    model: str | None
    """The model of a configuration that names none; None for a linear one."""
    by_row: bool
    """Whether a row is computed from itself alone, as privacy of rows needs it."""

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The loader's parameters, by name."""
        return inspect.signature(self.load).parameters


DATASETS: Registry[DatasetInfo] = Registry(
    "fedblend.data.datasets", plugins="fedblend.datasets"
)
"""All datasets, by name."""


def dataset(
    summary: str,
    size: Size,
    license: str,
    *,
    name: str | None = None,
    needs: tuple[PublicFiles, ...] = (),
    model: str | None = None,
    by_row: bool = False,
) -> Callable[[Loader], Loader]:
    """Register the dataset that the decorated function loads.

    Args:
        summary: what the rows are, in one line.
        size: how many rows, classes and clients.
        license: the terms of use, and what to cite.
        name: by which ``load`` finds it; by default the function's.
        needs: the files that it reads.
        model: the model of a configuration that names none; None for a linear one.
        by_row: whether a row is computed from itself alone; otherwise a private run on
            it has no guarantee.
    """

    def register(load: Loader) -> Loader:
        own = name or load.__name__
        info = DatasetInfo(own, load, summary, size, license, needs, model, by_row)
        DATASETS.add(info)
        return load

    return register


def info(name: str) -> DatasetInfo:
    """What is known of the dataset of this name."""
    if name not in DATASETS:
        raise DataError(f"dataset: {name!r} is unknown; {hint(name, DATASETS)}")
    return DATASETS[name]


def load(name: str, /, **options: Any) -> Dataset:
    """Load a dataset by name with these options, and check it."""
    found = info(name)
    for option in options:
        if option not in found.options:
            raise DataError(
                f"{name}: no option {option!r}; {hint(option, found.options)}"
            )
    for option, parameter in found.options.items():
        if parameter.default is parameter.empty and option not in options:
            raise DataError(f"{name}: the option {option!r} must be given")
    try:
        loaded = found.load(**options)
    except TypeError as error:
        raise DataError(f"{name}: an option has the wrong type: {error}") from None
    check(loaded)
    return loaded


def check_kind(kind: Any) -> None:
    """Raise a one-line ``DataError`` for what is neither a ``Kind`` nor None."""
    if kind is not None and kind not in get_args(Kind):
        raise DataError(f"kind: {kind!r} is not one of {', '.join(get_args(Kind))}")


def check(dataset: Dataset) -> None:
    """Raise a one-line ``DataError`` for a dataset that cannot be trained on."""
    check_kind(dataset.kind)
    name, targets = dataset.name or "dataset", dataset.rows[1]
    check_rows(dataset, dataset.rows, dataset.keys, name)
    if dataset.kind not in NUMBERS and len(np.unique(targets)) < 2:
        raise DataError(
            f"{name}: all {len(targets)} targets are {targets.flat[0]}; at least 2 "
            "classes are needed"
        )
    if dataset.test_rows is not None:
        check_rows(dataset, dataset.test_rows, dataset.test_keys, f"{name} (test)")


def check_rows(
    dataset: Dataset, rows: Rows, keys: np.ndarray | None, where: str
) -> None:
    """Raise a one-line ``DataError`` for rows that are not of the dataset's kind."""
    inputs, targets = rows
    if len(inputs) == 0:
        raise DataError(f"{where}: there are no rows")
    for what, values in (("targets", targets), ("client keys", keys)):
        if values is not None and len(values) != len(inputs):
            raise DataError(
                f"{where}: {len(inputs)} rows of inputs, but {len(values)} {what}"
            )
    if dataset.schema is None:
        _check_finite(inputs, dataset.columns, f"{where}: inputs")
    _check_finite(targets, (), f"{where}: targets")
    if dataset.kind == "sequence":
        _check_numbers(dataset, "input", inputs, (len(inputs), inputs.shape[-1]), where)
        _check_numbers(dataset, "target", np.maximum(targets, 0), inputs.shape, where)
    elif dataset.kind == "tags":
        wanted = (len(inputs), dataset.outputs)
        _check_numbers(dataset, "target", targets, wanted, where)
    elif dataset.kind not in NUMBERS:
        _check_numbers(dataset, "target", targets, (len(inputs),), where)


def _check_numbers(
    dataset: Dataset, what: str, values: np.ndarray, shape: tuple[int, ...], where: str
) -> None:
    """Class numbers of this shape; 0 or 1 for binary and tags."""
    if not np.issubdtype(values.dtype, np.integer) or values.shape != shape:
        each = "one integer a row" if len(shape) == 1 else f"integers of shape {shape}"
        raise DataError(
            f"{where}: {what}s must be {each}, not {values.dtype} of shape "
            f"{values.shape}"
        )
    top = 1 if dataset.kind in ("binary", "tags") else dataset.outputs - 1
    wrong = np.argwhere((values < 0) | (values > top))
    if wrong.size:
        place = tuple(wrong[0])
        raise DataError(
            f"{where}: {what} {values[place]} in row {place[0]} (counted from 0) is "
            f"not a class in 0..{top}"
        )


def _check_finite(values: np.ndarray, columns: tuple[str, ...], where: str) -> None:
    if not np.issubdtype(values.dtype, np.inexact) or np.isfinite(values).all():
        return
    place = tuple(int(axis) for axis in np.argwhere(~np.isfinite(values))[0])
    column = ", ".join(str(axis) for axis in place[1:])
    if columns and len(place) == 2:
        column = repr(columns[place[1]])
    at = f"row {place[0]} (counted from 0)" + (f", column {column}" if column else "")
    raise DataError(f"{where}: {at} is {values[place]}; only finite numbers are usable")


def digest(arrays: Iterable[Any]) -> str:
    """The sha256 of arrays, with their shapes and dtypes."""
    found = hashlib.sha256()
    for array in map(np.asarray, arrays):
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def group_rows(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The rows of each client in ascending order; rows of no client have owner -1."""
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    counts = np.bincount(owner[order], minlength=clients)
    return np.split(order, np.cumsum(counts)[:-1])


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random generator for one purpose, which is part of the seed."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise DataError(f"seed: {seed!r} is not an integer of 0 or more")
    return np.random.default_rng((int(seed), zlib.crc32(purpose.encode())))


@contextmanager
def intact(path: Path, problem: str) -> Iterator[None]:
    """Read a file inside: any damage of it raises one line with this problem."""
    try:
        yield
    except DataError:
        raise
    except (*_MALFORMED, *_BROKEN_OFF, *_NO_ARCHIVE):
        raise DataError(f"{path}: {problem}") from None


def open_unpacked(path: Path) -> IO[bytes]:
    """A file for reading: the content of a .xz, .bz2 or .gz file, or the file itself.

    An unfinished download, ``.part``, is read as what it will be.
    """
    opened = _OPENERS.get(Path(path.name.removesuffix(".part")).suffix)
    return path.open("rb") if opened is None else cast(IO[bytes], opened(path))
