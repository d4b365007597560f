# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page docs/cli.md, the reference of all commands, from the command line itself."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer

from fedblend.cli import app

HEAD = """\
# Commands

`fedblend COMMAND --help` shows the same in the terminal, and `python -m fedblend`
is the same program. Wrong input ends a command with one line and exit code 2.
"""
EXAMPLES = re.compile(r"^\[bold\]Examples?\[/bold\]$", re.MULTILINE)
MARKUP = re.compile(r"\[/?(?:bold|dim|italic)\]")


def commands(command: Any = None, name: str = "fedblend") -> Iterator[tuple[str, Any]]:
    """Every command that is not hidden, with its name, groups before their own."""
    command = command or typer.main.get_command(app)
    if command.hidden:
        return
    yield name, command
    for own, inside in getattr(command, "commands", {}).items():
        yield from commands(inside, f"{name} {own}")


def page() -> str:
    """The whole page."""
    found = list(commands())[1:]
    lines = [HEAD, "| command | what it does |", "|---|---|"]
    for name, command in found:
        anchor = name.replace(" ", "-")
        lines.append(f"| [`{name}`](#{anchor}) | {_cell(_summary(command))} |")
    return "\n".join([*lines, "", *(_described(*one) for one in found)])


def _described(name: str, command: Any) -> str:
    """A command: its call, what it does, its arguments and options, examples."""
    told, *examples = EXAMPLES.split(command.help or "")
    parts = [f"## `{name}`"]
    if not getattr(command, "commands", None):
        parts.append(f"```text\n{_call(name, command)}\n```")
    parts.append(MARKUP.sub("", told).strip())
    arguments = [one for one in _shown(command) if one.param_type_name == "argument"]
    options = [one for one in _shown(command) if one.param_type_name == "option"]
    if any(_told(one) or not one.required for one in arguments):
        parts.append(_table("argument", arguments))
    if options:
        parts.append(_table("option", options))
    if examples:
        shown = [line for line in examples[0].splitlines() if line.strip()]
        parts.append(MARKUP.sub("", "\n".join(["```text", *shown, "```"])))
    return "\n\n".join(parts) + "\n"


def _shown(command: Any) -> list[Any]:
    return [one for one in command.params if not getattr(one, "hidden", False)]


def _summary(command: Any) -> str:
    """The first paragraph of the help text."""
    return " ".join(MARKUP.sub("", (command.help or "").split("\n\n")[0]).split())


def _call(name: str, command: Any) -> str:
    """The command with its arguments, and those options that it cannot do without."""
    words = [name]
    for one in _shown(command):
        if one.param_type_name == "argument":
            word = _placeholder(one) + ("..." if one.nargs < 0 else "")
            words.append(word if one.required else f"[{word}]")
    words += [
        f"{one.opts[0]} {_placeholder(one)}"
        for one in _shown(command)
        if one.param_type_name == "option" and one.required
    ]
    optional = any(
        one.param_type_name == "option" and not one.required for one in _shown(command)
    )
    return " ".join([*words, *(["[OPTIONS]"] if optional else [])])


def _placeholder(one: Any) -> str:
    choices = getattr(one.type, "choices", None)
    if choices:
        return "|".join(_plain(choice) for choice in choices)
    return one.metavar or one.name.upper()


def _table(kind: str, params: list[Any]) -> str:
    lines = [f"| {kind} | what it is | default |", "|---|---|---|"]
    for one in params:
        if kind == "argument":
            name = _placeholder(one)
        else:
            name = ", ".join([*one.opts, *one.secondary_opts])
            name += "" if one.is_flag else f" {_placeholder(one)}"
        needed = "required" if one.required else _default(one)
        lines.append(f"| `{_cell(name)}` | {_cell(_told(one))} | {_cell(needed)} |")
    return "\n".join(lines)


def _told(one: Any) -> str:
    text = MARKUP.sub("", getattr(one, "help", None) or "")
    return f"{text} May be repeated.".strip() if one.multiple else text


def _default(one: Any) -> str:
    flag = getattr(one, "is_flag", False)
    if flag or one.default is None or callable(one.default):
        return ""
    return f"`{_plain(one.default)}`"


def _plain(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
