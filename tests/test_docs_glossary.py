# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The glossary names what exists, and every public name is explained."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api_reference import HOMES, pages

import fedblend as fb

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "glossary.md").read_text(encoding="utf-8")
GLOSSARY = PAGE.partition("\n## Notation\n")[0]
COMMAND = re.compile(r"fedblend [a-z]+$")


def rows() -> Iterator[list[str]]:
    """The cells of every row of the tables."""
    for line in GLOSSARY.splitlines():
        if line.startswith("| ") and not line.startswith("| word "):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            yield [cell.strip() for cell in cells]


def code_names() -> list[str]:
    return [name for row in rows() for name in re.findall(r"`([^`]+)`", row[2])]


def has_field(value: Any, name: str) -> bool:
    """Whether instances have it: a method, a property, or a field without a default."""
    known = getattr(value, "__dataclass_fields__", {})
    return hasattr(value, name) or name in known or assigned(value, name)


def assigned(value: Any, name: str) -> bool:
    """Whether ``__init__`` of a class sets it."""
    return inspect.isclass(value) and f"self.{name}" in inspect.getsource(value)


def exists(name: str) -> bool:
    """Whether a name of the column *code* is one of the package."""
    path, _, argument = name.removesuffix(")").partition("(")
    first, *parts = path.split(".")
    if first.startswith("fedblend"):
        importlib.import_module(path)
        return not argument
    value: Any = fb
    for part in parts:
        if not has_field(value, part):
            return False
        value = getattr(value, part, None)
    return not argument or argument in inspect.signature(value).parameters


def commands() -> set[str]:
    from fedblend.cli import app

    registered = [*app.registered_commands, *app.registered_groups]
    names = {entry.name for entry in registered if entry.name}
    return names | {
        entry.callback.__name__
        for entry in app.registered_commands
        if entry.callback is not None
    }


def test_every_code_name_in_the_glossary_exists():
    names = code_names()
    assert len(names) > 60
    shown = {name.split()[1] for name in names if COMMAND.match(name)}
    assert shown <= commands()
    missing = [name for name in names if not COMMAND.match(name) and not exists(name)]
    assert missing == []


def test_a_name_that_does_not_exist_is_noticed():
    assert exists("fb.simulate(cohort)") and exists("fb.Up.delta")
    assert not exists("fb.simulate(lanes)")
    assert not exists("fb.Up.letter")


def test_every_word_has_one_meaning():
    words = [row[0] for row in rows()]
    assert len(words) == len(set(words)) > 60
    assert all(len(row) == 6 for row in rows())


def test_every_public_concept_is_explained():
    """A class, algorithm or transform is in the glossary or in the API reference."""
    reference = pages()["api.md"]
    glossary = set(code_names())
    unexplained = [
        name
        for name in HOMES
        if f"fb.{name}" not in glossary and f"`fb.{name}`" not in reference
    ]
    assert unexplained == []
