# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables ``[model]`` and ``[algorithm]``: by a name that is known, or imported."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import reduce, wraps
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import (
    ConfigDict,
    Discriminator,
    PlainValidator,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from fedblend.config.imports import imported, is_import_path, one_line_errors
from fedblend.config.schema.algorithm import OPTIONS, PLACEHOLDERS, Options, options_of
from fedblend.config.schema.table import IMPORTED, Table, Word, first_error
from fedblend.config.schema.tables import NAMED_MODELS, ModelChoice
from fedblend.core import Algorithm
from fedblend.errors import SettingError
from fedblend.registry import ALGORITHMS, TRAINS, AlgorithmEntry, Builder


class ImportedModel(ModelChoice):
    """A model by import path; all other keys are arguments of the function."""

    model_config = ConfigDict(extra="allow")

    import_from: Word | None = None

    @model_validator(mode="before")
    @classmethod
    def _knows_all_keys(cls, content: Any) -> Any:
        return content

    @property
    def function(self) -> Callable[..., Any]:
        """The function that the name means; this imports its module."""
        return imported(self.name, self.import_from)


def imported_options(content: Any) -> Options:
    """The table of an algorithm by import path: this imports its module.

    The function is one that ``registry.algorithm`` registers, or another of the same
    parameters; its options without a rule have the types of their defaults.
    """
    if isinstance(content, Options):
        return content
    name, folder = content["name"], content.get("import_from")
    build = imported(name, folder if isinstance(folder, str) else None)
    own = [one for one in ALGORITHMS.values() if build in (one.build, one.builder)]
    other = AlgorithmEntry(name, build, build, ("update",), TRAINS, {}, None, None)
    entry = dataclasses.replace(own[0] if own else other, name=name)
    entry = dataclasses.replace(entry, build=_with_one_line_errors(name, entry.build))
    with one_line_errors(name):
        table = options_of(entry)
    plain = {
        one.name: (type(one.default), one.default)
        for one in entry.parameters.values()
        if isinstance(one.default, bool | int | float | str)
        and one.name not in table.model_fields
    }
    fields: Any = {"import_from": (str | None, None), **plain}
    table = create_model(table.__name__, __base__=table, **fields)
    try:
        options = table.model_validate(content)
    except ValidationError as error:
        key, _, why = first_error(error, content).partition(": ")
        raise SettingError(key, why) from None
    built = options.build(**PLACEHOLDERS)
    if not isinstance(built, Algorithm):
        wrong = f'"{name}": returned a {type(built).__name__}, not an Algorithm'
        raise SettingError("name", wrong)
    return options


def _with_one_line_errors(name: str, build: Builder) -> Builder:
    """The builder, its errors in one line."""

    @wraps(build)
    def build_or_explain(*args: Any, **kwargs: Any) -> Algorithm:
        with one_line_errors(name):
            return build(*args, **kwargs)

    return build_or_explain


def one_of_or_imported(tables: Iterable[type[Table]], other: Any) -> Any:
    """The type of a table that is one of several by its name, or else ``other``.

    ``other`` is the type of a table whose name is an import path.
    """
    known: list[Any] = [
        Annotated[one, Tag(get_args(one.model_fields["name"].annotation)[0])]
        for one in tables
    ]
    kinds = reduce(or_, known, Annotated[other, Tag(IMPORTED)])
    return Annotated[kinds, Discriminator(_kind)]


def _kind(table: Any) -> str | None:
    """The name of a table; import paths are one kind."""
    given = isinstance(table, Mapping)
    name = table.get("name") if given else getattr(table, "name", None)
    if is_import_path(name):
        return IMPORTED
    return None if name is None else str(name)


if TYPE_CHECKING:
    AnyModel = ModelChoice
    AnyOptions = Options
else:
    AnyModel = one_of_or_imported(NAMED_MODELS, ImportedModel)
    AnyOptions = one_of_or_imported(
        OPTIONS.values(), Annotated[Any, PlainValidator(imported_options)]
    )
