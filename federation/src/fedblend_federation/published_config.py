# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The configuration of an experiment as nodes get it: without paths of the server."""

from pathlib import Path

from fedblend.config.config import Config
from fedblend.config.imports import TABLES, is_import_path

_FILES = (("central", "file"), ("adapt", "base"))
"""Keys that are paths, of which nodes get the names alone."""


def without_paths(config: Config) -> Config:
    """The configuration with names of files, and without folders of code.

    A node finds its base by ``adapt.sha256``, and has its own code.
    """
    for name, key in _FILES:
        path = getattr(getattr(config, name), key, None)
        if path is not None:
            config = _with(config, name, key, Path(path).name)
    for name in TABLES:
        if is_import_path(getattr(config, name).name):
            config = _with(config, name, "import_from", None)
    return config


def _with(config: Config, name: str, key: str, value: str | None) -> Config:
    table = getattr(config, name).model_copy(update={key: value})
    return config.model_copy(update={name: table})
