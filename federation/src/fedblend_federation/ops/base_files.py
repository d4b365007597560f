# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The frozen base that all machines of a new federation get."""

from pathlib import Path

from fedblend.config.tables.adapt import hash_file
from fedblend.errors import RunError
from fedblend_federation.client.bases import SUFFIX, SUMS, require_base

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
