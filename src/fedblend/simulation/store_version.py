# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Telling whether the files of a disk store are those that a checkpoint goes with.

A small file beside them names the run that writes them and counts how often rows were
written. The count moves before the rows do: files whose count is not the checkpoint's
hold rows that the checkpoint knows nothing about.
"""

import os
import secrets
from pathlib import Path

import numpy as np


class StoreError(ValueError):
    """Files of a disk store that do not go with a checkpoint."""


class Stamp:
    """The mark of a folder: eight bytes that name a run, and a count."""

    def __init__(self, folder: Path):
        self.path = folder / "stamp"
        self.run = np.frombuffer(secrets.token_bytes(8), np.uint8)
        self.count = 0
        self.claimed = False

    def claim(self) -> None:
        """Mark the folder as this run's, unless it is already."""
        if not self.claimed:
            self.write(self.count)

    def remove(self) -> None:
        """Mark the folder as nobody's."""
        self.path.unlink(missing_ok=True)

    def write(self, count: int) -> None:
        """Mark the folder as this run's, rows written ``count`` times."""
        self.count, self.claimed = count, True
        beside = self.path.with_name("stamp.new")
        beside.write_text(f"{self.run.tobytes().hex()} {count}\n")
        os.replace(beside, self.path)

    def adopt(self, run: np.ndarray, count: int, most: int) -> None:
        """Go on with files written by this run, ``count`` to ``most`` times."""
        try:
            name, found = self.path.read_text().split()
            found = int(found)
        except (OSError, ValueError):
            raise StoreError(
                f"{self.path.parent} has not the clients' states it goes with"
            ) from None
        if name != run.tobytes().hex():
            raise StoreError(f"{self.path.parent} has the states of another run")
        if not count <= found <= most:
            raise StoreError(
                f"{self.path.parent} has the states of another moment "
                f"(written {found} times, not {count})"
            )
        self.run, self.count, self.claimed = np.array(run), found, True
