# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Commands that other distributions add: the federation's, and those of papers."""

from importlib.metadata import entry_points
from typing import NamedTuple

import typer

GROUP = "fedblend.commands"
"""The group of entry points with which another distribution adds a command."""


class Plugin(NamedTuple):
    """A command of another distribution, and what to say where it is missing."""

    summary: str
    distribution: str
    install: str


FEDERATION = ("fedblend-federation", "pip install 'fedblend[federation]'")
REPRODUCTIONS = (
    "fedblend-reproductions",
    "in a clone of fedblend's repository: pip install ./adapters ./reproductions",
)
PLUGINS = {
    "federation": Plugin("Set up and look after a real federation", *FEDERATION),
    "reproduce": Plugin("Measure the claims of a paper", *REPRODUCTIONS),
    "board": Plugin("Rerun published tables of personalized methods", *REPRODUCTIONS),
    "audit-privacy": Plugin("Attack a private training", *REPRODUCTIONS),
}


def add_to(app: typer.Typer) -> None:
    """Add the commands, or some whose error says how to install them."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name, plugin in PLUGINS.items():
        if name not in found:
            text = f"{plugin.summary}; needs {plugin.distribution}."
            missing = _missing(name, plugin)
            app.command(name, help=text, context_settings=anything)(missing)
            continue
        command = found[name].load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)


def _missing(name: str, plugin: Plugin):
    def missing() -> None:
        raise typer.BadParameter(
            f"{name}: the distribution {plugin.distribution} is not installed; "
            f"{plugin.install}"
        )

    return missing
