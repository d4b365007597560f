# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The file of a frozen base: safetensors, known by its sha256."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.errors import ConfigError
from fedblend.simulation.serialize import WireError, array_at, read_header


def with_hash(table: dict[str, Any]) -> dict[str, Any]:
    """The table ``[adapt]`` with the sha256 of its base, where it gives none.

    Raises:
        ConfigError: there is no such file.
    """
    base = table.get("base")
    if not isinstance(base, str) or table.get("sha256") is not None:
        return table
    return {**table, "sha256": hash_file(Path(base))}


def hash_file(path: Path) -> str:
    """The sha256 of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"adapt.base: {path}: {error.strerror or error}") from None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, by name; they are read where they are used.

    Raises:
        ConfigError: it is no file of safetensors.
    """
    try:
        body = memoryview(np.memmap(path, np.uint8, "r"))
        header, _, body = read_header(body)
        return {name: array_at(body, entry) for name, entry in header.items()}
    except (WireError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"adapt.base: {path}: {error}") from None
