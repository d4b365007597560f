# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend demo``: ``fedblend auto`` on the example table."""

from pathlib import Path
from typing import Annotated

from fedblend.cli.auto import auto
from fedblend.cli.data import HEART
from fedblend.cli.screen import option


def demo(
    out: Annotated[Path, option("Folder of the results.")] = Path("runs/heart"),
) -> None:
    """Compare methods on heart patients of four hospitals, and say what to deploy.

    It is fedblend auto on the table that fedblend data example writes.

    [bold]Example[/bold]

    fedblend demo --out runs/heart
    """
    auto(HEART, client="center", target="disease", out=out)
