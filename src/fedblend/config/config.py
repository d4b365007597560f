# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One TOML file describes a run.

``load`` reads and checks it, ``dump`` writes it with every default made explicit, and
``difference`` names the first key in which two of them differ. Paths in a file are
relative to its folder.

A configuration needs its data, the columns of its client and target, and the name of an
algorithm. ``fill`` writes all other keys that have to be there into the raw tables,
before they are checked; what a file states is never changed. Keys that only have plain
defaults have them in the schema. The folder of a run has every key in ``config.toml``.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from fedblend.config import toml
from fedblend.config.imports import choose, import_paths
from fedblend.config.table import (
    Content,
    Table,
    Word,
    first_error,
    refuse_first,
    subtable,
)
from fedblend.config.tables import adapt, algorithm, data, model
from fedblend.config.tables.adapt import Adapt
from fedblend.config.tables.central import Central
from fedblend.config.tables.compress import Compress
from fedblend.config.tables.federation import Federation, check_secure
from fedblend.config.tables.measure import Measure
from fedblend.config.tables.privacy import Privacy, Protect
from fedblend.config.tables.run import Populations, RunTable
from fedblend.errors import ConfigError, SettingError
from fedblend.registry import ALGORITHMS

VERSION = 1
"""The layout of a file that states none, and the newest that this version reads."""
ROUNDS = 100
MANY, COHORT = 100, 10
"""Clients of a dataset beyond which a round has a cohort, and its size."""
NEEDED = ("data", "algorithm")
"""Tables that a configuration cannot leave out."""
_PATHS = {"data": ("file",), "central": ("file",), "adapt": ("base",)}
"""The keys that are paths, by table."""
_KEYS = {
    **{name: f"run.{name}" for name in RunTable.model_fields},
    "splits": "measure.splits",
    "measure_on": "measure.on",
}
"""The keys of a configuration by what ``simulate`` calls them."""


class Config(Table):
    """A run: its data, model, algorithm, and how it is computed and measured."""

    version: Literal[1]
    name: Word
    data: data.AnyData
    model: model.AnyModel
    algorithm: algorithm.AnyOptions
    adapt: Adapt | None = None
    compress: Compress | None = None
    privacy: Privacy | None = None
    central: Central | None = None
    populations: Populations | None = None
    protect: Protect | None = None
    run: RunTable
    measure: Measure = Measure()
    federation: Federation | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> "Config":
        federated = isinstance(self.data, data.NodeRows)
        self._check_cohorts(federated)
        if self.protect is not None:
            wrong = "is not for a federation; the policy of each node has it"
            refuse_first((federated, "protect", wrong))
            self.require_gradients("protect.rows")
        if federated and self.federation and self.federation.secure:
            check_secure(self, getattr(self.data, "clients"))  # noqa: B009
        adapt.check(self)
        model.check(self)
        return self

    def _check_cohorts(self, federated: bool) -> None:
        """Refuse two ways to draw a cohort, and ways that a federation has not."""
        run, populations, hidden = self.run, self.populations or {}, self.privacy
        total = sum(table.weight for table in populations.values())
        refuse_first(
            (
                self.populations is not None and abs(total - 1) > 1e-6,
                "populations",
                f"the weights sum to {total:g}, not to 1",
            ),
            (
                self.populations is not None and run.cohort is not None,
                "run.cohort",
                f"{run.cohort} goes without populations, each has a cohort",
            ),
            *(
                (
                    federated and getattr(run, key) not in (None, "fixed"),
                    f"run.{key}",
                    f"is not for a federation; {why}",
                )
                for key, why in (
                    ("epoch", "it draws every round"),
                    ("separation", "it draws every round"),
                    ("sampling", "its cohorts have a fixed size"),
                    ("until", "its server does not know f~ and takes run.rounds"),
                )
            ),
            (
                hidden is not None
                and hidden.adjacency == "add_or_remove"
                and run.sampling != "poisson",
                "privacy.adjacency",
                '"add_or_remove" needs run.sampling = "poisson"',
            ),
        )

    def require_gradients(self, key: str) -> None:
        """Refuse an algorithm that noise on gradients of rows does not cover.

        Args:
            key: of the setting that asks for the noise.

        Raises:
            SettingError: it uses the rows in another way, too.
        """
        reads, own = self.algorithm.entry.reads, getattr(self.algorithm, "personal", 0)
        solver, only = getattr(own, "solver", "sgd"), "and noise covers gradients alone"
        refuse_first(
            (
                reads != "gradients",
                key,
                f"{self.algorithm.name} uses {reads} of rows, {only}",
            ),
            (
                solver not in ("sgd", "gradient_descent"),
                key,
                f"algorithm.personal.solver = {solver!r} uses losses of rows, {only}",
            ),
        )


def fill(content: Content, name: str | None = None) -> Content:
    """The raw tables of a configuration with all that they leave out.

    Args:
        content: as TOML has it; what is no table is left for the schema to refuse.
        name: of the run, where the content has none.

    Raises:
        SettingError: nothing can be chosen for a key.
    """
    rows, options = subtable(content, "data"), subtable(content, "algorithm")
    adapters = adapt.usual_adapters(options)
    choice = {"name": model.usual_model(rows, bool(adapters))}
    choice |= subtable(content, "model")
    label = f"{data.origin(rows)}-{options.get('name', 'run')}"
    adapted = {"adapt": adapters} if adapters else {}
    after = {"version": VERSION, "name": name or label, **adapted, **content}
    for key, table in (
        ("data", {**rows, **data.usual_partition(rows)}),
        ("model", choice),
        ("algorithm", algorithm.fill(options, str(choice["name"]))),
        ("run", {"rounds": ROUNDS, **subtable(content, "run")}),
    ):
        if isinstance(content.get(key, None if key in NEEDED else {}), dict):
            after[key] = table
    if any(_new_keys(content, after)):
        _make_affordable(content, after)
    return after


def _make_affordable(content: Content, after: Content) -> None:
    """Add a cohort where there are many clients; measure less of a chosen network."""
    rows, run = subtable(after, "data"), subtable(after, "run")
    size, name = data.dataset_size(rows), subtable(after, "model").get("name")
    many = size is not None and (size.clients or 0) > MANY and data.has_clients(rows)
    drawn = "populations" in content or bool({"epoch", "separation"} & set(run))
    entry = ALGORITHMS.get(str(subtable(after, "algorithm").get("name")))
    more: dict[str, Content] = {}
    if many and not drawn and not (entry and entry.everyone):
        more["run"] = {"cohort": COHORT}
    if "name" not in subtable(content, "model") and name not in model.LINEAR:
        held_out = {"splits": ["test"]} if rows.get("test", True) else {}
        more["measure"] = {"local": False, **held_out}
    for key, table in more.items():
        if isinstance(after.get(key, {}), dict):
            after[key] = {**table, **subtable(after, key)}


def _new_keys(content: Content, after: Content) -> Iterator[tuple[str, Any]]:
    """The keys that ``fill`` wrote, with their values, in the order of the tables."""
    for key, value in after.items():
        before = content.get(key)
        if isinstance(value, dict) and (before is None or isinstance(before, dict)):
            inside = _new_keys(before or {}, value)
            yield from ((f"{key}.{inner}", of) for inner, of in inside)
        elif key not in content:
            yield key, value


def load(path: Path, sets: Iterable[str] = ()) -> Config:
    """Read a file, apply ``a.b=value`` settings, and check everything.

    Raises:
        ConfigError: one line with the file, the key, its value and what is allowed.
    """
    return check(_content(path, sets), str(path), path.parent, path.stem)


def keys_left_out(path: Path, sets: Iterable[str] = ()) -> dict[str, Any]:
    """The keys that ``load`` chose because the file leaves them out, with values."""
    content = _anchor(_content(path, sets), path.parent)
    return dict(_new_keys(content, fill(content, path.stem)))


def _content(path: Path, sets: Iterable[str]) -> dict[str, Any]:
    content = toml.read(path)
    for setting in sets:
        toml.put(content, setting)
    return content


def loads(text: str, where: str) -> Config:
    """The configuration in a text; ``where`` it stands is for errors.

    Raises:
        ConfigError: one line, as of ``load``.
    """
    return check(toml.parse(text, where), where)


def check(
    content: dict[str, Any],
    where: str,
    folder: Path = Path(),
    name: str | None = None,
) -> Config:
    """The configuration in a table, with all that it leaves out.

    Args:
        content: the table.
        where: it stands, for errors.
        folder: to which its paths are relative.
        name: of the run, where the table has none.
    """
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ConfigError(
            f"{where}: version: {version} is newer than this fedblend, which reads "
            f"up to {VERSION}; update fedblend"
        )
    choose(content)
    try:
        content = adapt.add_hash(fill(_anchor(content, folder), name))
        return Config.model_validate(content)
    except SettingError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_error(error, content)}") from None


def _anchor(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content with its paths made absolute."""
    anchored = dict(content)
    for name, keys in _PATHS.items():
        table = content.get(name)
        if isinstance(table, dict):
            paths = {
                key: str((folder / table[key]).absolute())
                for key in keys
                if isinstance(table.get(key), str) and table[key]
            }
            anchored[name] = {**table, **paths}
    for key in import_paths(content):
        name = key.partition(".")[0]
        own = Path(content[name].get("import_from", "."))
        anchored[name] = {
            **content[name],
            "import_from": str((folder / own).absolute()),
        }
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
    """The first key in which two configurations differ, with both values.

    Any number of devices goes on with a run.
    """
    devices = {"run": {"devices"}}
    return tables_differ(
        one.model_dump(exclude=devices), other.model_dump(exclude=devices)
    )


def tables_differ(one: Any, other: Any, path: tuple[str, ...] = ()) -> str | None:
    """``difference`` of nested tables."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            found = tables_differ(one.get(key), other.get(key), (*path, key))
            if found:
                return found
        return None
    if one == other:
        return None
    values = ["not given" if v is None else toml.literal(v) for v in (one, other)]
    return f"{'.'.join(path)}: {values[0]} there, {values[1]} here"


@contextlib.contextmanager
def rename_errors(**others: str) -> Iterator[None]:
    """Errors of ``simulate`` inside, with the keys of a configuration.

    ``others`` are further names, with what the user calls them.
    """
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(": ")
        known = _KEYS | others
        if name not in known:
            raise
        raise ConfigError(f"{known[name]}: {rest}") from None
