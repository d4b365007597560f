# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend list``: the algorithms, datasets, models and transforms by name."""

from enum import StrEnum
from typing import Annotated

import typer

from fedblend.cli import data, screen


class Listing(StrEnum):
    """What can be listed."""

    algorithms = "algorithms"
    datasets = "datasets"
    models = "models"
    transforms = "transforms"


def list_(
    kind: Annotated[Listing, typer.Argument(help="What to list.", show_choices=True)],
) -> None:
    """List the algorithms, datasets, models or transforms.

    [bold]Examples[/bold]

    fedblend list algorithms

    fedblend list datasets
    """
    lists = {
        Listing.algorithms: _algorithms,
        Listing.datasets: data.list_,
        Listing.models: _models,
        Listing.transforms: _transforms,
    }
    lists[kind]()


def _algorithms() -> None:
    from fedblend.config.tables.algorithm import OPTIONS, Options

    made = screen.table(
        "name", "what it is", "own options", "a client sends", "published"
    )
    common = Options.model_fields
    for name, options in OPTIONS.items():
        entry = options.entry
        own = [key for key in options.model_fields if key not in common]
        if "alpha" in entry.parameters:
            own = ["alpha", *own]
        sends = ", ".join(entry.sends) or "nothing"
        made.add_row(name, entry.summary, ", ".join(own), sends, entry.venue)
    console = screen.console()
    console.print(made)
    shared = ", ".join(key for key in common if key not in ("name", "alpha"))
    console.print(f"options of all: {shared}", soft_wrap=True)


def _transforms() -> None:
    from fedblend.registry import TRANSFORMS

    made = screen.table("name", "what it is", "published")
    for name, entry in TRANSFORMS.items():
        made.add_row(name, entry.summary, entry.venue)
    screen.console().print(made)


def _models() -> None:
    from fedblend.config.toml import literal
    from fedblend.models import MODELS

    made = screen.table("name", "what it is", "options with their defaults")
    for name, info in MODELS.items():
        options = [
            f"{key} = {literal(default)}"
            for key, default in info.options.items()
            if key != "dtype"
        ]
        made.add_row(name, info.summary, ", ".join(options))
    screen.console().print(made)
