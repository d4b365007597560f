# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation``: experiments on a federation, from run to predict."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen
from fedblend_federation.cli.machines import (
    HostedClient,
    NodePath,
    app,
    server_settings,
)

ServerOption = Annotated[
    Path,
    typer.Option(
        "--server", metavar="FILE", help="Settings of the server, server.toml."
    ),
]


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="TOML file of the experiment.")],
    settings: Annotated[
        Path | None,
        typer.Option(
            "--server",
            metavar="FILE",
            help="Settings of the server; default: server.toml here or beside FILE.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; default: runs/NAME beside server.toml."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a stopped experiment.")
    ] = False,
    enroll_again: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="Client that lost its state and starts anew; repeat for more.",
        ),
    ] = None,
) -> None:
    """Run an experiment on the nodes, and write results to a folder.

    On the machine of the server, while fedblend federation server runs. A server that
    dies meanwhile is restarted and goes on.

    [bold]Example[/bold]

    fedblend federation run trial.toml --server server.toml --out runs/trial
    """
    from fedblend.cli.run import results_folder, show_summary
    from fedblend.config.config import load
    from fedblend.runs import run_folder
    from fedblend_federation.ops import experiments

    config, settings = load(file), settings or _server_file(file)
    known = server_settings(settings)
    # Where the service of the link may write.
    out = out or settings.parent / results_folder(config)
    experiments.open_folder(out, config, known, resume, enroll_again or [])
    try:
        experiments.run_experiment(known, out, log=screen.note)
    except KeyboardInterrupt:
        screen.note(
            f"the experiment goes on; fedblend federation stop {out} ends it, the same "
            "command with --resume waits for it again"
        )
        raise typer.Exit(screen.INTERRUPTED) from None
    show_summary(out, run_folder.read_summary(run_folder.Folder(out)))


def _server_file(experiment: Path) -> Path:
    """server.toml in this folder, or else beside the file of an experiment."""
    here, beside = Path("server.toml"), experiment.with_name("server.toml")
    # Path.exists fails in a folder that this user may not enter.
    return here if os.path.exists(here) or not os.path.exists(beside) else beside


@app.command()
def status(
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder of an experiment.")
    ] = None,
    settings: ServerOption = Path("server.toml"),
) -> None:
    """Show which nodes are connected, and how far an experiment is.

    The link knows the nodes, which needs server.toml; without it only the experiment is
    shown.

    [bold]Examples[/bold]

    fedblend federation status --server server/server.toml

    fedblend federation status runs/trial
    """
    from fedblend_federation.flower import processes
    from fedblend_federation.ops.experiments import status_lines
    from fedblend_federation.ops.registration import members
    from fedblend_federation.ops.settings import name_clients

    if settings.exists() or out is None:
        known = server_settings(settings)
        processes.connect(known)
        for member in members(known):
            told = name_clients(member.clients)
            typer.echo(f"node {member.name}, {told}: {member.status}")
    if out is not None:
        for line in status_lines(out):
            typer.echo(line)


@app.command()
def log(
    where: Annotated[
        Path,
        typer.Argument(
            metavar="OUT|FILE", help="Folder of an experiment, node.toml, or an audit."
        ),
    ] = Path("node.toml"),
    client: HostedClient = None,
) -> None:
    """Print the audit, the newest line last; fail if a line was changed.

    [bold]Examples[/bold]

    fedblend federation log runs/trial

    fedblend federation log node.toml
    """
    from fedblend_federation.ops.audit import verify
    from fedblend_federation.ops.experiments import audit_lines, audit_of

    path = audit_of(where, client)
    for line in audit_lines(path):
        typer.echo(line)
    verify(path)


@app.command()
def stop(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the experiment.")
    ],
    settings: ServerOption = Path("server.toml"),
) -> None:
    """Stop an experiment; fedblend federation run with --resume goes on with it.

    [bold]Example[/bold]

    fedblend federation stop runs/trial --server server.toml
    """
    from fedblend.config.config import load
    from fedblend_federation.ops import experiments
    from fedblend_federation.server.checkpoint import read_progress

    experiments.stop(server_settings(settings), out)
    round, _ = read_progress(out / "server")
    rounds = load(out / "config.toml").run.rounds
    typer.echo(f"stopped after round {round} of {rounds}; --resume goes on")


@app.command()
def predict(
    data: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Rows to predict: .csv, .parquet or .npz."),
    ],
    settings: NodePath = Path("node.toml"),
    client: HostedClient = None,
    experiment: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Experiment whose model predicts; default: the newest."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="CSV file of the predictions; default: print them."
        ),
    ] = None,
) -> None:
    """Predict rows on a node, by the model that an experiment left there.

    CSV with a column prediction, one line a row. Targets in the file are ignored.

    [bold]Example[/bold]

    fedblend federation predict node.toml --data new.csv --out predictions.csv
    """
    from fedblend.runs.run_folder import csv_text
    from fedblend_federation.client.predict import predict_rows
    from fedblend_federation.ops.settings import client_at

    found = predict_rows(client_at(settings, client), data, experiment)
    text = csv_text(["prediction"], ([value] for value in found.values))
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text)
    screen.note(
        f"{len(found.values)} rows by the model of experiment {found.experiment} after "
        f"round {found.round}"
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path(
        "runs/federation-demo"
    ),
) -> None:
    """A real federation on this machine: a link, four nodes, APFL and FLIX.

    Takes some minutes, and leaves nothing running.

    [bold]Example[/bold]

    fedblend federation demo --out runs/federation-demo
    """
    from fedblend_federation.ops.local_cluster import demo as show_demo

    try:
        show_demo(out, typer.echo)
    except KeyboardInterrupt:
        screen.note("interrupted; everything it had started is ended")
        raise typer.Exit(screen.INTERRUPTED) from None
