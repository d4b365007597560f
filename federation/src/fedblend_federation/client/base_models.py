# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Frozen base models: those on a node's own disk, and the one of a new federation.

A base is put on a node once, by its operator: ``bases`` of ``node.toml`` names a file,
or a folder with files. A configuration that arrives in a message says which base it
means by its sha256 alone; its path is the server's, and never opened here.
"""

import dataclasses
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fedblend.config.tables.adapt import hash_file, read_arrays
from fedblend.config.toml import parse
from fedblend.errors import ConfigError, RunError
from fedblend_federation.contract import Contract

SUFFIX, SUMS = ".safetensors", "SHA256SUMS"
"""Of bases in a folder; a list of them beside, as ``sha256sum --check`` reads it."""
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?!\.)([^/\0]+)")


class ListedBase(NamedTuple):
    """A base that the list of a folder names."""

    file: Path
    sha256: str


def unnamed_base(text: str) -> str | None:
    """Why the base of a configuration in a message is refused unread, or None.

    This comes before any check of the configuration, which would look for the file.
    """
    table = parse(text, "message").get("adapt")
    if not isinstance(table, dict) or "base" not in table or table.get("sha256"):
        return None
    return "adapt.sha256: is missing; this node finds a base by it"


def located(contract: Contract, bases: Path | None) -> Contract:
    """The contract with the base of this node in place of the server's.

    Args:
        contract: from a message.
        bases: of ``node.toml``.

    Raises:
        ConfigError: there is no such base here.
    """
    table = contract.config.adapt
    if table is None or table.base is None:
        return contract
    if bases is None:
        raise ConfigError("adapt.base: this node has no bases; node.toml names none")
    for file in files_in(bases):
        if sha256_of(file) == table.sha256:
            own = table.model_copy(update={"base": str(file)})
            config = contract.config.model_copy(update={"adapt": own})
            return dataclasses.replace(contract, config=config)
    raise ConfigError(
        f"adapt.base: this node has no base with the sha256 {table.sha256}; its "
        "operator may put it in bases of node.toml"
    )


def files_in(bases: Path) -> list[Path]:
    """The files of bases: one, or those of a folder; none where nothing is there."""
    if bases.is_dir():
        return sorted(file for file in bases.glob(f"*{SUFFIX}") if file.is_file())
    return [bases] if bases.is_file() else []


def sha256_of(file: Path) -> str:
    """The sha256 of a file; one that did not change is read once."""
    found = file.stat()
    return _hashed(file, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _hashed(file: Path, inode: int, modified: int, size: int) -> str:
    del inode, modified, size
    return hash_file(file)


def named_in(bases: Path) -> Iterator[ListedBase]:
    """The bases that the list in a folder names.

    Raises:
        ConfigError: a line is not of the form "SHA256  FILE".
    """
    listed = bases / SUMS
    if not listed.is_file():
        return
    text = listed.read_text(encoding="utf-8", errors="replace")
    for line in filter(None, text.splitlines()):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f'{listed}: "{line[:80]}" is not "SHA256  FILE"')
        yield ListedBase(bases / match[2], match[1])


def require_base(file: Path) -> None:
    """Refuse a file that is no base.

    Raises:
        ConfigError: it cannot be read, or is no file of safetensors.
    """
    if not read_arrays(file):
        raise ConfigError(f"adapt.base: {file}: has no weights")


MAX_COPIED = 50_000_000
"""Bytes of a base that is copied to all machines, inside of their scripts."""


def base_files(base: Path) -> dict[str, bytes]:
    """The list of bases of a machine, and the base itself if scripts can hold it."""
    if base.suffix != SUFFIX or base.name.startswith("."):
        raise RunError(f"--base: {base}: is not a file {SUFFIX}")
    digest = hash_file(base)
    require_base(base)
    files = {SUMS: f"{digest}  {base.name}\n".encode()}
    if base.stat().st_size <= MAX_COPIED:
        files[base.name] = base.read_bytes()
    return files
