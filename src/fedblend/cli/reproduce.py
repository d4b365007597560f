# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of the distribution fedblend-reproductions."""

from importlib.metadata import entry_points

import typer

GROUP = "fedblend.commands"
"""The group of entry points with which another distribution adds a command."""
COMMANDS = {
    "reproduce": "Measure the claims of a paper",
    "board": "Rerun published tables of personalized methods",
}
"""The commands, and what their help says where the distribution is missing."""
MISSING = (
    "the distribution fedblend-reproductions is not installed; in "
    "a clone of fedblend's repository: pip install ./reproductions"
)


def add_to(app: typer.Typer) -> None:
    """Add the commands, or some whose error says how to install them."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    for name, summary in COMMANDS.items():
        for found in entry_points(group=GROUP, name=name):
            app.command(name)(found.load())
            break
        else:
            text = f"{summary}; needs the distribution fedblend-reproductions."
            app.command(name, help=text, context_settings=anything)(_missing(name))


def _missing(name: str):
    def missing() -> None:
        raise typer.BadParameter(f"{name}: {MISSING}")

    return missing
