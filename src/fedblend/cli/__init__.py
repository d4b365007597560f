# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The command line.

Commands import slow modules when they run, so that ``--help`` is fast. ``main`` turns
bad input of any kind into one line and exit code 2; any other exception is a bug and
keeps its traceback.
"""

import errno
import os
import sys
from typing import Annotated, Any

# First: without the extra [cli] it ends here, in one line.
import fedblend.cli.requirements  # noqa: F401

# isort: split

import typer

from fedblend import __version__, cpu_devices
from fedblend.cli import (
    auto,
    compare,
    data,
    init,
    judge,
    list_,
    personalize,
    plan,
    plugins,
    predict,
    report,
    run,
    tune,
)
from fedblend.cli.screen import INTERRUPTED, complain

app = typer.Typer(
    name="fedblend",
    help="Federated learning by mixing.\n\nStart with fedblend demo, then write your "
    "own configuration with fedblend init and run it with fedblend run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("auto")(auto.auto)
app.command("run")(run.run)
app.command("compare")(compare.compare)
app.command("sweep")(compare.sweep)
app.command("judge")(judge.judge)
app.command("export")(predict.export)
app.command("predict")(predict.predict)
app.command("personalize")(personalize.personalize)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.command("init")(init.init)
app.command("list")(list_.list_)
app.command("show")(report.show)
app.command("track")(run.track)
app.command("report")(report.report)
app.add_typer(data.app, name="data")
plugins.add_to(app)
app.command("demo")(auto.demo)

UsageError: Any = typer.BadParameter.__mro__[1]
"""click's error for a command line it cannot parse; typer has its own copy."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, which do not name a file."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedblend {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    del version


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = run.join_seeds(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        cpu_devices.count_devices()
        code = command.main(arguments, prog_name="fedblend", standalone_mode=False)
    except UsageError as error:
        return complain(_sentence(error))
    except ValueError as error:
        from fedblend.errors import InputError

        if not isinstance(error, InputError):
            raise
        return complain(str(error))
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:
            raise
        where = error.filename or "results cannot be written"
        return complain(f"{where}: {error.strerror}")
    return code if isinstance(code, int) else 0


def entry() -> None:
    """The process ``fedblend``: exit with the code of ``main``."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == INTERRUPTED:
        # Threads of XLA may still compute; finalizing the interpreter meanwhile has
        # ended in a segmentation fault.
        os._exit(code)
    sys.exit(code)


def _sentence(error: Exception) -> str:
    say = getattr(error, "format_message", error.__str__)
    text = " ".join(say().split()).replace("Value error, ", "")
    return f"{text} (see fedblend --help)"
