# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend reproduce``: a command of another distribution, where it is installed."""

from importlib.metadata import entry_points

import typer

GROUP = "fedblend.commands"
"""The entry points by which another distribution adds a command."""
MISSING = (
    "reproduce: the distribution fedblend-reproductions is not installed; in "
    "a clone of fedblend's repository: pip install ./reproductions"
)


def add_to(app: typer.Typer) -> None:
    """Add the command, or one that says how to install it."""
    for found in entry_points(group=GROUP, name="reproduce"):
        app.command("reproduce")(found.load())
        return
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("reproduce", context_settings=anything)(_missing)


def _missing() -> None:
    """Measure what a paper claims: needs the distribution fedblend-reproductions."""
    raise typer.BadParameter(MISSING)
