# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""TOML: reading it with one-line errors, ``a.b=value`` settings, writing it."""

import datetime
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from fedblend.errors import ConfigError

LONGEST, PARTS = 65536, 8
"""Bytes of TOML in a message, and parts of a key anywhere: the parser's time grows
with the square of the parts, 30,000 of them are 60 kB and took 234 s and 5.6 GB."""
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TEXTS = re.compile(
    r'''"""(?:\\.|(?!""")[^\\])*+(?:"{3,5})?|'{3}(?:(?!'{3}).)*+(?:'{3,5})?'''
    r"""|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?|#[^\n]*+""",
    re.DOTALL,
)
"""Texts, also those that do not end, and comments; in one pass, whatever is there."""


def visible(text: str) -> str:
    """The text on one line: what does not print is shown as an escape."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def read(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def parse(text: str | bytes, where: str) -> dict[str, Any]:
    """The content of TOML text; ``where`` it stands is for errors."""
    try:
        text = text if isinstance(text, str) else text.decode()
        for piece in re.split(r"[=,{}\[\]\n]", _TEXTS.sub("", text)):
            if piece.count(".") >= PARTS:
                raise ValueError(f"a key has more than {PARTS} parts")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start} is not UTF-8; a TOML file is expected"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = visible(str(error))
        if isinstance(error, RecursionError):
            reason = "nested too deeply"
        raise ConfigError(f"{where}: not valid TOML: {reason}") from None


def put(content: dict[str, Any], setting: str) -> None:
    """Apply ``a.b=value`` to the content; the value is TOML, or a bare text."""
    name, equals, value = setting.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise ConfigError(
            f"--set {visible(setting)}: not a setting; write key=value, "
            "such as algorithm.rate=0.1"
        )
    table = content
    for depth, key in enumerate(keys[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            there = ".".join(keys[: depth + 1])
            raise ConfigError(
                visible(f"--set {setting}: {there} is {literal(table)}, not a table")
            )
    table[keys[-1]] = value_of(value.strip())


def value_of(text: str) -> Any:
    """The value that a text stands for: TOML, or else the text itself."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text


def write(content: dict[str, Any]) -> str:
    """TOML text of nested tables; None stands for a key that is not there."""
    return "\n".join(_table(content, ())).lstrip("\n") + "\n"


def _table(content: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [
        f"{quote(key)} = {literal(value)}"
        for key, value in content.items()
        if value is not None and not isinstance(value, dict)
    ]
    if path:
        lines = ["", f"[{'.'.join(map(quote, path))}]", *lines]
    for key, value in content.items():
        if isinstance(value, dict):
            lines += _table(value, (*path, key))
    return lines


def literal(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        inside = ", ".join(f"{quote(k)} = {literal(v)}" for k, v in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return repr(value)


def quote(key: str) -> str:
    """A key as TOML writes it."""
    return key if _BARE.fullmatch(key) else literal(key)
