# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where a dataset's file is: the user's own, or a public one."""

from pathlib import Path

from fedblend.data.dataset import MissingDataError
from fedblend.data.download import find


def find_either(name: str, chosen: str | None, *files: str) -> Path:
    """The path of the user's own file, or of a public file of a dataset.

    Args:
        name: of the dataset.
        chosen: the path of the user's file, if there is one.
        files: otherwise the first of these files that exists.
    """
    if chosen is None:
        return find(name, *files)
    path = Path(chosen)
    if not path.is_file():
        raise MissingDataError(f"{name}: {path}: no such file")
    return path
