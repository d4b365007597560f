# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend demo``: five methods compared on handwritten digits."""

from pathlib import Path
from typing import Annotated

from fedblend.cli import screen
from fedblend.cli.screen import option


def demo(
    out: Annotated[Path, option("Folder of the results.")] = Path("runs/demo"),
) -> None:
    """Compare training alone, FedAvg, fine-tuning, FLIX and APFL on digits.

    [bold]Example[/bold]

    fedblend demo --out runs/demo
    """
    screen.compile_cache()
    from fedblend.runs.demo import demo as show_demo

    with screen.interruptible():
        show_demo(out, screen.console())
