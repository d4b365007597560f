# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One TOML file describes a run.

``load`` reads and checks it, ``dump`` writes it with every default made explicit, and
``difference`` names the first key in which two of them differ. Paths in a file are
relative to its folder.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from pydantic import ValidationError, model_validator

from fedblend import models
from fedblend.config import defaults, toml
from fedblend.config.base_file import with_hash
from fedblend.config.imports import choose, import_paths
from fedblend.config.schema import tables
from fedblend.config.schema.attack import Attack
from fedblend.config.schema.federation import Federation
from fedblend.config.schema.imported import AnyModel, AnyOptions
from fedblend.config.schema.privacy import Privacy, Protect
from fedblend.config.schema.run import Run
from fedblend.config.schema.table import Table, Word, first_error
from fedblend.config.secure import check_secure
from fedblend.data.dataset import DATASETS, Task
from fedblend.errors import ConfigError, SettingError

VERSION = defaults.VERSION
"""The newest layout of the file that this version reads."""
_OF_LINEAR = {"head": ["bias"], "body": ["weight"]}
"""A linear model is a single layer: its head is the intercept."""
RENAMED = {("algorithm", "tune"): "algorithm.finetune"}
"""Keys of earlier versions, with their names of today."""
LOOKED_UP = {"dual_encoder": {"embedding": ("0", "1")}}
"""By model: the tables it looks rows up in, and which inputs have the numbers."""
_PATHS = {"data": ("file", "path"), "central": ("file", "path"), "adapt": ("base",)}
"""The keys that are paths, by table."""
_KEYS = {
    **{name: f"run.{name}" for name in Run.model_fields},
    "splits": "measure.splits",
    "measure_on": "measure.on",
}
"""The keys of a configuration by what ``simulate`` calls them."""


class Config(Table):
    """A run: its data, model, algorithm, and how it is computed and measured."""

    version: Literal[1]
    name: Word
    data: tables.AnyData
    model: AnyModel
    algorithm: AnyOptions
    adapt: tables.Adapt | None = None
    compress: tables.Compress | None = None
    privacy: Privacy | None = None
    central: tables.Central | None = None
    select: tables.Select | None = None
    populations: tables.Populations | None = None
    attack: Attack | None = None
    protect: Protect | None = None
    run: Run
    measure: tables.Measure = tables.Measure()
    federation: Federation | None = None

    @model_validator(mode="after")
    def _one_way_to_draw(self) -> "Config":
        cohort, populations = self.run.cohort, self.populations
        if populations is not None:
            total = sum(table.weight for table in populations.values())
            if abs(total - 1) > 1e-6:
                raise SettingError(
                    "populations", f"the weights sum to {total:g}, not to 1"
                )
            if cohort is not None:
                wrong = f"{cohort} goes without populations, each has a cohort"
                raise SettingError("run.cohort", wrong)
        for key, why in (
            *((key, "it draws every round") for key in ("epoch", "separation")),
            ("sampling", "its cohorts have a fixed size"),
            ("until", "its server does not know f~ and takes run.rounds"),
        ):
            given = getattr(self.run, key) not in (None, "fixed")
            if given and isinstance(self.data, tables.Nodes):
                raise SettingError(f"run.{key}", f"is not for a federation; {why}")
        if self.attack is not None and isinstance(self.data, tables.Nodes):
            wrong = "is not for a federation; it makes clients of a simulation lie"
            raise SettingError("attack", wrong)
        hidden, random = self.privacy, self.run.sampling == "poisson"
        if hidden is not None and hidden.adjacency == "add_or_remove" and not random:
            wrong = '"add_or_remove" needs run.sampling = "poisson"'
            raise SettingError("privacy.adjacency", wrong)
        return self

    @model_validator(mode="after")
    def _noise_hides_rows(self) -> "Config":
        if self.protect is None:
            return self
        if isinstance(self.data, tables.Nodes):
            wrong = "is not for a federation; the policy of each node has it"
            raise SettingError("protect", wrong)
        self.require_gradients("protect.rows")
        return self

    def require_gradients(self, key: str) -> None:
        """Refuse an algorithm that noise on gradients of rows does not cover.

        Args:
            key: of the setting that asks for the noise.

        Raises:
            SettingError: it uses the rows in another way, too.
        """
        reads, own = self.algorithm.entry.reads, getattr(self.algorithm, "personal", 0)
        solver = getattr(own, "solver", "sgd")
        for wrong, what in (
            (reads != "gradients", f"{self.algorithm.name} uses {reads} of rows"),
            (
                solver not in ("sgd", "gradient_descent"),
                f"algorithm.personal.solver = {solver!r} uses losses of rows",
            ),
        ):
            if wrong:
                why = f"{what}, and noise covers gradients alone"
                raise SettingError(key, why)

    @model_validator(mode="after")
    def _sums_hide_clients(self) -> "Config":
        federation = self.federation
        if isinstance(self.data, tables.Nodes) and federation and federation.secure:
            check_secure(self, self.data.clients)
        return self

    @model_validator(mode="after")
    def _has_layers_to_adapt(self) -> "Config":
        tables.require_form(self.adapt, self.algorithm)
        if self.adapt is None:
            return self
        name = self.model.name
        for wrong, why in (
            (name in defaults.LINEAR, f"{name} has no layer before its last one"),
            (name == "dual_encoder", "the loss of dual_encoder reads its table itself"),
        ):
            if wrong:
                raise SettingError("adapt", why)
        return self

    @model_validator(mode="after")
    def _rows_to_look_up(self) -> "Config":
        model, data, central = self.model.name, self.data, self.central
        numbers = data.partition == "nodes" and data.kind == "classes"
        known = DATASETS.get(str(data.source))
        numbers = numbers or (known is not None and known.model == "dual_encoder")
        if model == "dual_encoder" and not numbers:
            raise SettingError(
                "model.name",
                '"dual_encoder" reads numbers of movies, as data.source = "movielens" '
                'has them, or nodes with data.kind = "classes"',
            )
        if central is not None and central.penalty and model != "dual_encoder":
            wrong = f'"{central.penalty}" is of the embeddings of dual_encoder, and the'
            raise SettingError("central.penalty", f"{wrong} model is {model}")
        if self.select is not None:
            self._check_select(self.select.parameters)
        return self

    def _check_select(self, parameters: list[str]) -> None:
        name, model = self.model.name, self.model
        found = LOOKED_UP.get(name, {})
        for parameter in parameters:
            if found and parameter not in found:
                wrong = f'"{parameter}" is no table that {name} looks rows up in; there'
                raise SettingError(
                    "select.parameters", f"{wrong} is {', '.join(found)}"
                )
        decay = getattr(self.algorithm.optimizer, "weight_decay", 0)
        known = ", ".join(LOOKED_UP)
        for wrong, why in (
            (not found, f"{name} looks no rows up in a table; {known} does"),
            (
                model.loss not in (None, "hinge"),
                f'model.loss = "{model.loss}" reads the whole table',
            ),
            (model.l2, f"model.l2 = {model.l2} reads the whole table"),
            (self.compress, "does not go with [compress]"),
            (self.privacy, "reveals to the server which rows are whose; no [privacy]"),
            (decay, f"weight_decay = {decay} moves rows that nobody uses"),
        ):
            if wrong:
                raise SettingError("select", why)


def load(path: Path, sets: Iterable[str] = ()) -> Config:
    """Read a file, apply ``a.b=value`` settings, and check everything.

    Raises:
        ConfigError: one line with the file, the key, its value and what is allowed.
    """
    return check(_content(path, sets), str(path), path.parent, path.stem)


def chosen(path: Path, sets: Iterable[str] = ()) -> dict[str, Any]:
    """The keys that ``load`` chose because the file leaves them out, with values."""
    content = _anchored(_content(path, sets), path.parent)
    return dict(defaults.chosen(content, defaults.filled(content, path.stem)))


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
    for (table, key), now in RENAMED.items():
        if isinstance(content.get(table), dict) and key in content[table]:
            raise ConfigError(f"{where}: {table}.{key}: this key is now {now}")
    choose(content)
    try:
        content = defaults.filled(_anchored(content, folder), name)
        content = with_hash(content)
        return Config.model_validate(content)
    except SettingError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_error(error, content)}") from None


def _anchored(content: dict[str, Any], folder: Path) -> dict[str, Any]:
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
def named_by_key(**others: str) -> Iterator[None]:
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


def with_parts(config: Config, model: models.Model, task: Task) -> Config:
    """The configuration with the names of parameters in place of a word like "head".

    Raises:
        ConfigError: the model has no such part.
    """
    options = config.algorithm
    key = options.entry.keeps
    word = key and getattr(options, key)
    if not isinstance(word, str) or key is None:
        return config
    if config.model.name in defaults.LINEAR and word in _OF_LINEAR:
        names = _OF_LINEAR[word]
    else:
        whole = task.numbers or task.kind == "sequence"
        kind = jnp.int32 if whole else jnp.dtype(config.run.precision)
        rows = jax.ShapeDtypeStruct((2, *task.shape), kind)
        try:
            names = models.find_part(model, rows, word)
        except SettingError as error:
            can = word == "normalization" and hasattr(config.model, "norm")
            more = "; model.norm = true adds layers of it" if can else ""
            raise ConfigError(f"algorithm.{key}: {error.why}{more}") from None
    changed = options.model_copy(update={key: names})
    return config.model_copy(update={"algorithm": changed})
