# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Opening .npz files that may be damaged, or something else; nothing is unpickled."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedblend.data.dataset import DataError

_DAMAGE = (
    OSError,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


@contextmanager
def opened(path: Path, problem: str) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of a file; whatever is wrong with them is this one-line problem."""
    try:
        with path.open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise TypeError("a single array")
            with stored:
                yield stored
    except DataError:
        raise
    except _DAMAGE:
        raise DataError(f"{path}: {problem}") from None
