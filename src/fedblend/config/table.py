# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What all tables of a configuration have in common: nothing unknown, nothing coerced.

A text is not a number, ``true`` is not 1, and numbers are finite. The options of an
algorithm, a model, a solver, a compressor or a partition are the parameters of the
function that builds it: ``table_of`` makes a table of a function, with a type for every
rule of ``checks``, and ``arguments`` makes the function's arguments of such a table.
``first_error`` says in one line what is wrong: the key, its value, what is allowed.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from fedblend import checks
from fedblend.checks import Number, Paths, Rule, Words
from fedblend.config.imports import is_import_path
from fedblend.config.toml import literal, quote, visible
from fedblend.errors import ConfigError, SettingError, UserError, hint
from fedblend.models.parts import PARTS


def exactly_one(table: Any, *names: str) -> None:
    """Refuse a table that does not have exactly one of these keys."""
    given = sum(getattr(table, name) is not None for name in names)
    if given != 1:
        several = "both are given" if len(names) == 2 else "several are given"
        what = several if given else "is missing"
        keys = f"{', '.join(names[:-1])} or {names[-1]}"
        raise SettingError(keys, f"{what}; exactly one is needed")


def refuse_first(*refusals: tuple[Any, str, str]) -> None:
    """Refuse a configuration for the first of these that applies.

    Args:
        refusals: whether it applies, the key, and what is wrong with it.

    Raises:
        SettingError: the key, and what is wrong.
    """
    for applies, key, why in refusals:
        if applies:
            raise SettingError(key, why)


class Table(BaseModel):
    """A table of a configuration."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _knows_all_keys(cls, content: Any) -> Any:
        known = list(cls.model_fields)
        for key in content if isinstance(content, dict) else ():
            if key not in known:
                raise SettingError(key, f"unknown key; {hint(key, known)}")
        return content


Content = dict[str, Any]
"""Raw tables, as TOML has them."""


def subtable(content: Content, key: str) -> Content:
    """A table of the content; an empty one for anything else, which is refused."""
    found = content.get(key)
    return found if isinstance(found, dict) else {}


LARGEST = 2**31 - 1
IMPORTED = "package.module:function"
"""The kind of tables whose name is an import path."""
_KINDS = ("number", IMPORTED)
"""Kinds of values that are no names."""


def limit(rule: Number) -> AfterValidator:
    """The check that a number is in the range of a rule."""
    lone = dataclasses.replace(rule, clients=False)

    def check_value(value: float) -> float:
        if rule.whole and value > LARGEST:
            raise misfit(f"at most {LARGEST}")
        try:
            return lone("", value)
        except UserError:
            raise misfit(rule.bounds) from None

    return AfterValidator(check_value)


def matching(pattern: str, allowed: str) -> AfterValidator:
    """The check that a text matches a pattern; ``allowed`` says what would."""

    def check_value(value: str) -> str:
        if re.match(pattern, value) is None:
            raise misfit(allowed)
        return value

    return AfterValidator(check_value)


def misfit(allowed: str) -> PydanticCustomError:
    """The error of a value that is not what is allowed, in words."""
    return PydanticCustomError("range", "{allowed}", {"allowed": allowed})


Count = Annotated[int, limit(checks.COUNT)]
"""How many of something: 1 or more."""
Index = Annotated[int, limit(checks.WHOLE)]
"""A number from 0 on: a seed, a client."""
Word = Annotated[str, StringConstraints(min_length=1)]
"""A text that is not empty."""
Positive = Annotated[float, limit(checks.POSITIVE)]
NotNegative = Annotated[float, limit(checks.NOT_NEGATIVE)]
Fraction = Annotated[float, limit(checks.PART)]
"""At least 0 and below 1."""
Mixing = Annotated[float, limit(checks.FRACTION)]
"""A mixing weight: 0 and 1 are allowed."""
Share = Annotated[float, limit(Number(above=0, most=1))]
"""A part of something, up to all of it."""
Inside = Annotated[float, limit(checks.CHANCE)]
"""Above 0 and below 1."""

Split = Literal["train", "validation", "test"]
"""Rows that are measured."""
Names: Any = Annotated[list[Word], Field(min_length=1)]
"""Names of parts of a model."""


def one_word(allowed: tuple[str, ...]) -> Any:
    """The type of a text that is one of these words."""
    return Literal[allowed]


TYPES: dict[Rule, Any] = {checks.FLAG: bool}
"""The types of options by their rules; numbers, words and paths have theirs anyway."""
Made = TypeVar("Made", bound=Table)


def type_of(rule: Rule | None) -> Any:
    """The type of an option with this rule; None where a configuration has no type."""
    if isinstance(rule, Number):
        rule = dataclasses.replace(rule, optional=False)
    if rule is not None and rule in TYPES:
        return TYPES[rule]
    if isinstance(rule, Number):
        kind: Any = Annotated[int if rule.whole else float, limit(rule)]
        several: Any = Annotated[list[kind], Field(min_length=1)]
        return kind | several if rule.clients else kind
    if isinstance(rule, Words):
        return one_word(rule.allowed)
    if isinstance(rule, Paths):
        return one_word(PARTS) | Names
    return None


def table_of(
    function: Callable[..., Any],
    name: str,
    base: type[Made] = Table,
    *,
    tag: str = "name",
    keys: Mapping[str, str] | None = None,
    **others: Any,
) -> type[Made]:
    """The table with the options of a function: its parameters that have a rule.

    Args:
        function: with the rules of ``gate``.
        name: the word that chooses this table among others.
        base: the table whose fields it has besides.
        tag: the key of that word.
        keys: the keys of parameters that have another name in a configuration.
        others: fields in place of those that come from the function, None for no field.
    """
    fields: dict[str, Any] = {}
    rules: Mapping[str, Rule] = getattr(function, "rules", {})
    for parameter in inspect.signature(function).parameters.values():
        kind = type_of(rules.get(parameter.name))
        if kind is not None:
            key = (keys or {}).get(parameter.name, parameter.name)
            fields[key] = _field(kind, parameter)
    chosen = {key: field for key, field in (fields | others).items() if field}
    return tag_table(name, base, tag, **chosen)


def tag_table(
    name: str, base: type[Made], tag: str = "name", **fields: Any
) -> type[Made]:
    """The table that a word chooses among others: the base with more fields."""
    fields = {tag: (Literal[name], ...), **fields}
    return create_model(f"{base.__name__}_{name}", __base__=base, **fields)


def _field(kind: Any, parameter: inspect.Parameter) -> tuple[Any, Any]:
    """The type of a field and its default, as a configuration can state it."""
    default = parameter.default
    if default is parameter.empty:
        return kind, ...
    if default is None or default == math.inf:
        return kind | None, None
    return kind, default.__name__ if callable(default) else default


def one_of(tables: Iterable[type[Table]], tag: str = "name") -> Any:
    """The type of a table that is one of several, told apart by a key."""
    return Annotated[reduce(or_, tables), Field(discriminator=tag)]


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


Values = Mapping[str, Any]
"""In place of values of a table, by key, such as "optimizer.rate": they may be traced,
and are not checked again."""
NO_VALUES: Values = MappingProxyType({})


def values_inside(values: Values, key: str) -> Values:
    """Those of a table inside another."""
    inside = f"{key}."
    return {
        name.removeprefix(inside): of
        for name, of in values.items()
        if name.startswith(inside)
    }


def arguments(
    function: Callable[..., Any],
    table: Table,
    facts: Mapping[str, Any],
    keys: Mapping[str, str] | None = None,
    values: Values = NO_VALUES,
) -> dict[str, Any]:
    """The arguments of a function, as a table states them.

    Args:
        function: whose parameters they are.
        table: the options; None stands for the function's own default.
        facts: what is known besides, by the name of the parameter; None if unknown.
        keys: the keys of parameters that have another name in a configuration.
        values: in place of those of the table.
    """
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        key, value = (keys or {}).get(name, name), facts.get(name)
        if name not in facts:
            value = values.get(key, getattr(table, key, None))
        needed = name in facts and parameter.default is parameter.empty
        if _are_numbers(value):
            found[name] = np.array(value)
        elif value is not None and hasattr(value, "make"):
            found[name] = value.make(facts, values_inside(values, key))
        elif value is not None or needed:
            found[name] = value
    return found


def check_lists(where: str, table: Table, clients: int) -> None:
    """Refuse a list of numbers, one for each client, of another number of clients.

    Raises:
        ConfigError: one line, with the key.
    """
    for key, value in table:
        if isinstance(value, Table):
            check_lists(f"{where}.{key}", value, clients)
        elif _are_numbers(value) and len(value) != clients:
            raise ConfigError(
                f"{where}.{key}: {len(value)} numbers for {clients} clients; give one "
                "for each, or a single one"
            )


def _are_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, one for each client."""
    return isinstance(value, list) and isinstance(value[0], int | float)


_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def first_error(error: ValidationError, raw: Any) -> str:
    """The first problem that a validation found in the raw content."""
    details = error.errors(include_url=False)
    key, wrong = _first(details, raw)
    return visible(f"{'.'.join(key)}: {wrong}")


def _first(details: list[ErrorDetails], raw: Any) -> tuple[tuple[str, ...], str]:
    """The key of the first problem, and what is wrong with it."""
    first = details[0]
    key = _key(first, raw)
    if first["type"] == "missing":
        return key, "is missing"
    if first["type"] == "value_error":
        wrong: SettingError = first.get("ctx", {})["error"]
        return (*key, wrong.key), wrong.why
    if first["type"] == "union_tag_not_found" and not isinstance(first["input"], dict):
        return key, f"{_show(first['input'])} is not {_TYPES['model_type']}"
    if first["type"].startswith("union_tag"):
        tag = first.get("ctx", {})["discriminator"].strip("'")
        return (*key, tag.replace("_kind()", "name")), _explain_tag(first)
    tried = [one for one in details if _key(one, raw)[: len(key)] == key]
    closest = _closest(tried, raw)
    wanted = " or ".join(dict.fromkeys(map(_expectation, closest)))
    return _key(closest[0], raw), f"{_show(closest[0]['input'])} is not {wanted}"


def _closest(tried: list[ErrorDetails], raw: Any) -> list[ErrorDetails]:
    """Of the alternatives tried for one value, those that came nearest to it."""
    depth = max(len(_key(one, raw)) for one in tried)
    deepest = [one for one in tried if len(_key(one, raw)) == depth]
    fitting = [one for one in deepest if one["type"] not in _TYPES]
    out_of_range = [one for one in fitting if one["type"] != "literal_error"]
    return out_of_range or deepest


def _key(error: ErrorDetails, raw: Any) -> tuple[str, ...]:
    """The key in the file: a location less the names of alternatives tried."""
    key, here = [], raw
    for part in error["loc"]:
        inside = isinstance(here, Mapping) and part in here
        if inside or (isinstance(here, Sequence) and isinstance(part, int)):
            key.append(quote(str(part)))
            here = here[part]  # pyright: ignore
    if error["type"] == "missing":
        key.append(str(error["loc"][-1]))
    return tuple(key)


def _expectation(error: ErrorDetails) -> str:
    """What would have been right."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _TYPES:
        return _TYPES[kind]
    if kind == "range":
        return error["msg"]
    if kind == "literal_error":
        several = " or " in context["expected"]
        return f"{'one of ' * several}{context['expected']}".replace(" or ", ", ")
    if kind in ("too_short", "string_too_short"):
        return f"of length {context.get('min_length', 1)} or more"
    return f"usable: {error['msg']}"


def _explain_tag(error: ErrorDetails) -> str:
    """What is wrong with a table whose kind is missing or unknown."""
    if error["type"] == "union_tag_not_found":
        return "is missing"
    context = error.get("ctx", {})
    tag, known = context["tag"], context["expected_tags"].split(",")
    names = [one for one in (name.strip("' ") for name in known) if one not in _KINDS]
    return f"{_show(tag)} is unknown; {hint(tag, names)}"


def _show(value: Any) -> str:
    text = literal(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
