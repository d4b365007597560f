# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One TOML file describes a run.

``load`` reads and checks it, ``dump`` writes it with every default made explicit, and
``difference`` names the first key in which two of them differ. Paths in a file are
relative to its folder.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from fedblend.config import toml
from fedblend.config.central import Central
from fedblend.config.compress import Compress
from fedblend.config.errors import complaint
from fedblend.config.fedselect import Select, check_tables
from fedblend.config.populations import Populations
from fedblend.config.populations import check as check_populations
from fedblend.config.privacy import Privacy
from fedblend.config.schema.algorithm import AnyOptions
from fedblend.config.schema.table import ConfigError, Misfit, Table
from fedblend.config.schema.tables import (
    AnyData,
    AnyModel,
    Leading,
    Measure,
    Nodes,
    Run,
    Word,
)

VERSION = 1
"""The newest layout of the file that this version reads."""
RENAMED = {("algorithm", "tune"): "algorithm.finetune"}
"""Keys of earlier versions, with their names of today."""

__all__ = ["VERSION", "Config", "ConfigError", "check", "difference", "dump", "load"]


class Config(Table):
    """A run: its data, model, algorithm, and how it is computed and measured."""

    version: Literal[1]
    name: Word
    data: AnyData
    model: AnyModel
    algorithm: AnyOptions
    compress: Compress | None = None
    privacy: Privacy | None = None
    central: Central | None = None
    select: Select | None = None
    populations: Populations | None = None
    run: Run
    measure: Measure = Measure()
    federation: Leading | None = None

    @model_validator(mode="after")
    def _one_way_to_draw(self) -> "Config":
        if self.populations is not None:
            check_populations(self.populations, self.run.cohort)
        if self.run.epoch is not None and isinstance(self.data, Nodes):
            raise Misfit("run.epoch", "is not for a federation, which draws anew")
        return self

    @model_validator(mode="after")
    def _rows_to_look_up(self) -> "Config":
        check_tables(self)
        return self


def load(path: Path, sets: Iterable[str] = ()) -> Config:
    """Read a file, apply ``a.b=value`` settings, and check everything.

    Raises:
        ConfigError: one line with the file, the key, its value and what is allowed.
    """
    content = toml.read(path)
    for setting in sets:
        toml.put(content, setting)
    return check(content, str(path), path.parent)


def check(content: dict[str, Any], where: str, folder: Path = Path()) -> Config:
    """The configuration in a table; ``where`` it stands is for complaints."""
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ConfigError(
            f"{where}: version: {version} is newer than this fedblend, which reads "
            f"up to {VERSION}; update fedblend"
        )
    if version is None:
        raise ConfigError(f"{where}: version: is missing; write version = {VERSION}")
    for (name, key), now in RENAMED.items():
        if isinstance(content.get(name), dict) and key in content[name]:
            raise ConfigError(f"{where}: {name}.{key}: this key is now {now}")
    try:
        return Config.model_validate(_anchored(content, folder))
    except ValidationError as error:
        raise ConfigError(f"{where}: {complaint(error, content)}") from None


def _anchored(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content with the paths of its data made absolute."""
    anchored = dict(content)
    for name in ("data", "central"):
        table = content.get(name)
        if isinstance(table, dict):
            paths = {
                key: str((folder / table[key]).absolute())
                for key in ("file", "path")
                if isinstance(table.get(key), str) and table[key]
            }
            anchored[name] = {**table, **paths}
    return anchored


def dump(config: Config) -> str:
    """The configuration as TOML, every default made explicit."""
    return toml.write(_tidy(config.model_dump(exclude_none=True)))


def _tidy(table: dict[str, Any]) -> dict[str, Any]:
    """The name first, and no empty tables."""
    first = ("version", "name", "source", "file", "solver")
    keys = dict.fromkeys([*(key for key in first if key in table), *table])
    return {
        key: _tidy(table[key]) if isinstance(table[key], dict) else table[key]
        for key in keys
        if table[key] != {}
    }


def difference(one: Config, other: Config) -> str | None:
    """The first key in which two configurations differ, with both values."""
    return _differ(one.model_dump(), other.model_dump(), ())


def _differ(one: Any, other: Any, path: tuple[str, ...]) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            found = _differ(one.get(key), other.get(key), (*path, key))
            if found:
                return found
        return None
    if one == other:
        return None
    values = ["not given" if v is None else toml.literal(v) for v in (one, other)]
    return f"{'.'.join(path)}: {values[0]} there, {values[1]} here"
