# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The command line.

Everything that takes time to import is imported inside the commands, so that help
comes at once. Bad input of any kind is one line and exit code 2, said in ``main``;
what is not expected keeps its traceback, because it is a bug.
"""

import errno
import os
import sys
from typing import Annotated, Any

import typer

from fedblend import __version__
from fedblend.cli import (
    advise,
    data,
    federation,
    federation_run,
    init,
    personalize,
    plan,
    reproduce,
    run,
    show,
    tune,
)
from fedblend.cli.screen import INTERRUPTED, complain

app = typer.Typer(
    name="fedblend",
    help="Federated learning by mixing.\n\nfedblend demo shows what it does; "
    "fedblend init and fedblend run are the way to your own first run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("run")(run.run)
app.command("personalize")(personalize.personalize)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.command("advise")(advise.advise)
app.command("init")(init.init)
app.command("list")(show.list_)
app.command("show")(show.show)
app.add_typer(data.app, name="data")
federation_run.add_to(federation.app)
app.add_typer(federation.app, name="federation")
reproduce.add_to(app)
app.command("demo")(init.demo)

UsageError: Any = typer.BadParameter.__mro__[1]
"""A command line that cannot be understood; click's, wherever typer keeps it."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk says, without the name of a file."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedblend {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Say it and stop."
        ),
    ] = False,
) -> None:
    del version


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the answer is the exit code."""
    arguments = run.joined_seeds(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="fedblend", standalone_mode=False)
    except UsageError as error:
        return complain(_sentence(error))
    except ValueError as error:
        if not _expected(error):
            raise
        return complain(str(error))
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:
            raise
        where = error.filename or "results cannot be written"
        return complain(f"{where}: {error.strerror}")
    return code if isinstance(code, int) else 0


def entry() -> None:
    """The process ``fedblend``: what ``main`` answers is its exit code."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == INTERRUPTED:
        # Threads of XLA may still compute; taking the interpreter down around them
        # has ended in a segmentation fault.
        os._exit(code)
    sys.exit(code)


def _sentence(error: Exception) -> str:
    say = getattr(error, "format_message", error.__str__)
    text = " ".join(say().split()).replace("Value error, ", "")
    return f"{text} (see fedblend --help)"


def _expected(error: ValueError) -> bool:
    """Whether an error is about the user's input: these types are made for it."""
    # Looked up, not imported: whoever raised one has imported it, and not all of these
    # modules can be imported where only some of the extras are installed.
    homes = {
        "fedblend.errors": ("UserError",),
        "fedblend.data.dataset": ("DataError",),
        "fedblend.config.schema.table": ("ConfigError", "RunError"),
        "fedblend.simulation.checkpoint": ("CheckpointError",),
    }
    kinds = tuple(
        getattr(sys.modules[home], name)
        for home, names in homes.items()
        if home in sys.modules
        for name in names
    )
    return isinstance(error, kinds)
