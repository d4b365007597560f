# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation``: what there is to do while a federation is up."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.federation import (
    AtServer,
    NodeSettings,
    require_extra,
    server_settings,
)


def join(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (status, log, stop, predict, demo):
        app.command(command.__name__)(command)


def status(
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder of an experiment.")
    ] = None,
    settings: AtServer = Path("server.toml"),
) -> None:
    """Say which nodes are there, and how far an experiment is.

    Nodes are those that the link knows, and need server.toml; without one only the
    experiment is looked at.

    [bold]Examples[/bold]

    fedblend federation status --server server/server.toml

    fedblend federation status runs/trial
    """
    require_extra()
    from fedblend.deploy.ops import flwr_processes
    from fedblend.deploy.ops.registration import members
    from fedblend.deploy.ops.status import standing

    if settings.exists() or out is None:
        known = server_settings(settings)
        flwr_processes.connect(known)
        for member in members(known):
            typer.echo(f"node {member.name}, client {member.client}: {member.status}")
    if out is not None:
        for line in standing(out).lines():
            typer.echo(line)


def log(
    where: Annotated[
        Path,
        typer.Argument(
            metavar="OUT|FILE", help="Folder of an experiment, node.toml, or an audit."
        ),
    ] = Path("node.toml"),
) -> None:
    """Print what was asked and done, the newest last; say if a line was changed.

    [bold]Examples[/bold]

    fedblend federation log runs/trial

    fedblend federation log node.toml
    """
    from fedblend.deploy.ops.audit import verify
    from fedblend.deploy.ops.status import log_lines, log_of

    path = log_of(where)
    for line in log_lines(path):
        typer.echo(line)
    verify(path)


def stop(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Its folder.")],
    settings: AtServer = Path("server.toml"),
) -> None:
    """Stop an experiment; fedblend federation run with --resume goes on with it.

    [bold]Example[/bold]

    fedblend federation stop runs/trial --server server.toml
    """
    require_extra()
    from fedblend.deploy.ops import submit
    from fedblend.deploy.ops.status import standing

    submit.stop(server_settings(settings), out)
    now = standing(out)
    typer.echo(f"stopped after round {now.round} of {now.rounds}; --resume goes on")


def predict(
    data: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Rows: .csv, .parquet, .npz."),
    ],
    settings: NodeSettings = Path("node.toml"),
    experiment: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Whose model; the newest by default."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to; the terminal.")
    ] = None,
) -> None:
    """Predict rows on a node, by the model that an experiment left there.

    CSV with a column prediction, one line a row. Targets in the file are not looked
    at.

    [bold]Example[/bold]

    fedblend federation predict node.toml --data new.csv --out predictions.csv
    """
    require_extra()
    import csv
    import io

    from fedblend.deploy.client.predict import predicted
    from fedblend.deploy.ops.settings import Node, load_as

    found = predicted(load_as(Node, settings), data, experiment)
    text = io.StringIO()
    lines = [["prediction"], *([value] for value in found.values)]
    csv.writer(text, lineterminator="\n").writerows(lines)
    if out is None:
        typer.echo(text.getvalue(), nl=False)
    else:
        out.write_text(text.getvalue())
    screen.note(
        f"{len(found.values)} rows by the model of experiment {found.experiment} after "
        f"round {found.round}"
    )


def demo(
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path(
        "runs/federation-demo"
    ),
) -> None:
    """A real federation on this machine: a link, four nodes, APFL and FLIX.

    Takes some minutes, and leaves nothing running.

    [bold]Example[/bold]

    fedblend federation demo --out runs/federation-demo
    """
    require_extra()
    from fedblend.deploy.ops.demo import demo as show_demo

    try:
        show_demo(out, typer.echo)
    except KeyboardInterrupt:
        screen.note("interrupted; everything it had started is ended")
        raise typer.Exit(screen.INTERRUPTED) from None
