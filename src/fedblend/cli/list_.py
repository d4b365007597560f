# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend list``: the algorithms, datasets, models and transforms by name."""

from enum import StrEnum
from typing import Annotated

import typer

from fedblend.cli import screen


class Kind(StrEnum):
    """What can be listed."""

    algorithms = "algorithms"
    datasets = "datasets"
    models = "models"
    transforms = "transforms"


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_choices=True)],
) -> None:
    """List the algorithms, datasets, models or transforms.

    [bold]Examples[/bold]

    fedblend list algorithms

    fedblend list datasets
    """
    if kind is Kind.algorithms:
        _algorithms()
    elif kind is Kind.models:
        _models()
    elif kind is Kind.transforms:
        _transforms()
    else:
        from fedblend.cli.data import list_ as list_datasets

        list_datasets()


def _algorithms() -> None:
    from fedblend.config.schema.algorithm import OPTIONS, Options

    made = screen.table(
        "name", "what it is", "own options", "a client sends", "published"
    )
    common = Options.model_fields
    for name, options in OPTIONS.items():
        entry = options.entry
        own = ["alpha"] if "alpha" in entry.parameters else []
        own = ", ".join([*own, *(k for k in options.model_fields if k not in common)])
        sends = ", ".join(entry.sends) or "nothing"
        made.add_row(name, entry.summary, own, sends, entry.published)
    console = screen.console()
    console.print(made)
    shared = ", ".join(key for key in common if key not in ("name", "alpha"))
    console.print(f"options of all: {shared}", soft_wrap=True)


def _transforms() -> None:
    from fedblend.registry import TRANSFORMS

    made = screen.table("name", "what it is", "published")
    for name, entry in TRANSFORMS.items():
        made.add_row(name, entry.summary, entry.published)
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
