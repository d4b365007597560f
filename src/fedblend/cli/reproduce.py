# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend reproduce``: the command of the distribution fedblend-reproductions."""

from importlib.metadata import entry_points

import typer

GROUP = "fedblend.commands"
"""The group of entry points with which another distribution adds a command."""
MISSING = (
    "reproduce: the distribution fedblend-reproductions is not installed; in "
    "a clone of fedblend's repository: pip install ./reproductions"
)


def add_to(app: typer.Typer) -> None:
    """Add the command, or one whose error says how to install it."""
    for found in entry_points(group=GROUP, name="reproduce"):
        app.command("reproduce")(found.load())
        return
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("reproduce", context_settings=anything)(_missing)


def _missing() -> None:
    """Measure the claims of a paper; needs the distribution fedblend-reproductions."""
    raise typer.BadParameter(MISSING)
