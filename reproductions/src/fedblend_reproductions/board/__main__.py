# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m fedblend_reproductions.board``: ``fedblend board``, installed or not.

It needs neither pydantic nor the rest of the command line.
"""

import sys
from typing import Any

import typer

from fedblend.errors import InputError
from fedblend_reproductions.board.command import board

USAGE: Any = typer.BadParameter.__mro__[1]
"""click's error for a command line it cannot parse; typer has its own copy."""


def main(arguments: list[str]) -> int:
    """Run the command; bad input is one line and exit code 2."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command()(board)
    try:
        command = typer.main.get_command(app)
        return command.main(arguments, prog_name="board", standalone_mode=False) or 0
    except USAGE as error:
        return _complain(error.format_message())
    except InputError as error:
        return _complain(str(error))


def _complain(text: str) -> int:
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
