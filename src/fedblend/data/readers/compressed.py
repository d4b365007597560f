# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Tables in compressed files: .gz, and .zip with one .csv or .tsv file in it."""

import gzip
import zipfile
import zlib
from pathlib import Path

from fedblend.data.dataset import DataError

DAMAGE = (OSError, EOFError, zlib.error, zipfile.BadZipFile)
"""What a damaged file raises."""


def unpack(path: Path) -> bytes | None:
    """The content of a compressed file; None of another file."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix != ".zip":
        return None
    with zipfile.ZipFile(path) as members:
        names = [one for one in members.namelist() if one.endswith((".csv", ".tsv"))]
        if len(names) != 1:
            raise DataError(f"{path}: has {len(names)} .csv or .tsv files, needs one")
        return members.read(names[0])
