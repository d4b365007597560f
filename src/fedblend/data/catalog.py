# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The catalog: datasets by name, and the public files that they read.

A dataset is declared once, beside its loader::

    @dataset("Handwritten digits, 8 x 8", Size(rows=1797, classes=10), "CC BY 4.0")
    def digits() -> Dataset: ...

Its options are the loader's parameters; ``DATASETS`` imports every module of
``data.datasets`` when it is first read. The names, addresses and checksums of public
files are data, in ``catalog.toml``.
"""

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedblend.data.dataset import DataError, Dataset, check
from fedblend.errors import hint
from fedblend.registry import Registry

Loader = TypeVar("Loader", bound=Callable[..., Dataset])


class PublicFile(NamedTuple):
    """A file of a public dataset."""

    name: str
    """In the folder, and at the end of its addresses."""
    checksum: str
    """In hexadecimal; 64 digits are sha256, 32 are md5."""
    size: int | None = None
    """In bytes, where it is known."""
    addresses: Sequence[str] = ()
    """URLs, in the order of trying."""
    also: Sequence[str] = ()
    """Other names of the same file."""
    unpacked: bool = False
    """Whether the checksum is that of the content of a ``.bz2`` file."""


class PublicSet(NamedTuple):
    """The files of a public dataset."""

    folder: str
    """Below the data home."""
    files: tuple[PublicFile, ...]
    """All files that the dataset needs."""
    copies: tuple[PublicFile, ...] = ()
    """A reduced form, which is read where ``files`` are missing."""
    instruction: str = ""
    """How to obtain the files where ``get`` cannot download them, in one line."""


def _public() -> dict[str, PublicSet]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    for entry in entries.values():
        for kind in {"files", "copies"} & entry.keys():
            entry[kind] = tuple(PublicFile(**file) for file in entry[kind])
    return {name: PublicSet(**entry) for name, entry in entries.items()}


PUBLIC = _public()
"""The public datasets that have files, by the name that ``fedblend data get`` takes."""


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


class DatasetInfo(NamedTuple):
    """What is known of a dataset before it is loaded."""

    name: str
    load: Callable[..., Dataset]
    summary: str
    size: Size
    license: str
    """The terms of use, and what to cite."""
    needs: tuple[str, ...]
    """The public sets whose files the loader reads, by their names in ``PUBLIC``."""

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The loader's parameters, by name."""
        return inspect.signature(self.load).parameters


DATASETS: Registry[DatasetInfo] = Registry("fedblend.data.datasets")
"""All datasets, by name."""


def dataset(
    summary: str,
    size: Size,
    license: str,
    *,
    name: str | None = None,
    needs: tuple[str, ...] | None = None,
) -> Callable[[Loader], Loader]:
    """Register the dataset that the decorated function loads.

    Args:
        summary: what the rows are, in one line.
        size: how many rows, classes and clients.
        license: the terms of use, and what to cite.
        name: by which ``load`` finds it; by default the function's.
        needs: the public sets whose files it reads; by default that of its own name.
    """

    def register(load: Loader) -> Loader:
        own = name or load.__name__
        files = needs if needs is not None else (own,) if own in PUBLIC else ()
        DATASETS.add(DatasetInfo(own, load, summary, size, license, files))
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
