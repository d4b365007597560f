# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a configuration, in one line: key, value, and what is allowed."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedblend.config.schema.table import visible
from fedblend.config.schema.tables import Run
from fedblend.config.toml import literal, quoted
from fedblend.errors import ConfigError, SettingError, hint

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
_KEYS = {
    **{name: f"run.{name}" for name in Run.model_fields},
    "splits": "measure.splits",
    "measure_on": "measure.on",
}
"""The keys of a configuration by what ``simulate`` calls them."""

_MOVED = dict.fromkeys(
    ("apfl_fedtorch", "apfl_fedjax"),
    "is no algorithm of fedblend; fedblend_reproductions.apfl.other_libraries has it",
)
"""Names that configurations once had, and where to find them."""


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


def first_error(error: ValidationError, raw: Any) -> str:
    """The first problem that a validation found in the raw content."""
    return visible(_first(error, raw))


def _first(error: ValidationError, raw: Any) -> str:
    details = error.errors(include_url=False)
    first = details[0]
    key = _key(first, raw)
    if first["type"] == "missing":
        return f"{'.'.join(key)}: is missing"
    if first["type"] == "value_error":
        wrong: SettingError = first.get("ctx", {})["error"]
        return f"{'.'.join((*key, wrong.key))}: {wrong.why}"
    if first["type"].startswith("union_tag"):
        return _untagged(first, key, raw)
    tried = [one for one in details if _key(one, raw)[: len(key)] == key]
    return _misfit(_closest(tried, raw), raw)


def _closest(tried: list[ErrorDetails], raw: Any) -> list[ErrorDetails]:
    """Of the alternatives tried for one value, those that came nearest to it."""
    depth = max(len(_key(one, raw)) for one in tried)
    deepest = [one for one in tried if len(_key(one, raw)) == depth]
    fitting = [one for one in deepest if one["type"] not in _TYPES]
    out_of_range = [one for one in fitting if one["type"] != "literal_error"]
    return out_of_range or deepest


def _misfit(tried: list[ErrorDetails], raw: Any) -> str:
    wanted = " or ".join(dict.fromkeys(map(_wanted, tried)))
    shown = _shown(tried[0]["input"])
    return f"{'.'.join(_key(tried[0], raw))}: {shown} is not {wanted}"


def _key(error: ErrorDetails, raw: Any) -> tuple[str, ...]:
    """The key in the file: a location less the names of alternatives tried."""
    key, here = [], raw
    for part in error["loc"]:
        inside = isinstance(here, Mapping) and part in here
        if inside or (isinstance(here, Sequence) and isinstance(part, int)):
            key.append(quoted(str(part)))
            here = here[part]  # pyright: ignore
    if error["type"] == "missing":
        key.append(str(error["loc"][-1]))
    return tuple(key)


def _wanted(error: ErrorDetails) -> str:
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
    if kind == "string_pattern_mismatch":
        return "loss, accuracy, auc, mse or recall@K"
    return f"usable: {error['msg']}"


def _untagged(error: ErrorDetails, key: tuple[str, ...], raw: Any) -> str:
    """A table whose kind is missing or unknown."""
    context = error.get("ctx", {})
    name = context["discriminator"].strip("'").replace("_kind()", "name")
    if error["type"] == "union_tag_not_found":
        return f"{'.'.join((*key, name))}: is missing"
    tags = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
    tags = [tag for tag in tags if tag != "number"]
    shown = _shown(context["tag"])
    if context["tag"] in _MOVED:
        return f"{'.'.join((*key, name))}: {shown} {_MOVED[context['tag']]}"
    return f"{'.'.join((*key, name))}: {shown} is unknown; {hint(context['tag'], tags)}"


def _shown(value: Any) -> str:
    text = literal(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
