# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The file of a frozen base: safetensors, known by its sha256."""

import hashlib
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config import toml
from fedblend.errors import ConfigError
from fedblend.simulation.io.serialize import WireError, array_at, read_header


def with_hash(content: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the sha256 of its base, where it does not give one.

    Raises:
        ConfigError: there is no such file.
    """
    table = content.get("adapt")
    if not isinstance(table, dict) or table.get("sha256") is not None:
        return content
    base = table.get("base")
    if not isinstance(base, str):
        return content
    return {**content, "adapt": {**table, "sha256": hash_file(Path(base))}}


def require_base(config: Path) -> None:
    """Refuse the configuration of a run whose base is another file by now.

    A base that is not there is not missed: what was measured needs none.

    Raises:
        ConfigError: the file has another sha256.
    """
    table = toml.read(config).get("adapt") if config.is_file() else None
    if not isinstance(table, dict) or not isinstance(table.get("base"), str):
        return
    base = Path(table["base"])
    if base.is_file() and hash_file(base) != table.get("sha256"):
        raise ConfigError(
            f"{config}: adapt.base: {base} has changed since the run; its sha256 was "
            f"{table.get('sha256')}"
        )


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
        with path.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header, _, body = read_header(memoryview(whole))
        return {name: array_at(body, entry) for name, entry in header.items()}
    except (WireError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"adapt.base: {path}: {error}") from None
