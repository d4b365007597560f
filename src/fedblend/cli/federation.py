# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation``: a real federation, from its keys to its audit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen

if TYPE_CHECKING:
    from fedblend.deploy.ops.settings import Server

app = typer.Typer(
    help="Set up and look after a real federation.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Days = Annotated[
    int, typer.Option(metavar="N", help="How long the certificate is valid.")
]


def require_extra() -> None:
    """Say what is missing where the extra is not installed."""
    from importlib.util import find_spec

    from fedblend.errors import RunError

    if find_spec("cryptography") is None:
        raise RunError("federation: needs pip install 'fedblend[flower]'")


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write it; new or empty.")],
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Name or IP by which nodes reach it.")
    ],
    nodes: Annotated[
        str, typer.Option(metavar="A,B,...", help="A name for each node.")
    ],
    port: Annotated[int, typer.Option(metavar="N", help="Of the proxy.")] = 443,
    link_port: Annotated[
        int, typer.Option(metavar="N", help="Of the link behind it, on loopback.")
    ] = 8000,
    days: Days = 365,
) -> None:
    """Make keys, certificates and settings for a server and its nodes.

    What goes where is in README.md of the folder.

    [bold]Example[/bold]

    fedblend federation init lab --host fl.example.org --nodes alice,bob,carol
    """
    require_extra()
    from fedblend.deploy.ops.provision import provision

    names = [name.strip() for name in nodes.split(",")]
    provision(folder, host=host, nodes=names, port=port, link_port=link_port, days=days)
    typer.echo(f"wrote {folder} for {len(names)} nodes; read {folder / 'README.md'}")


@app.command("renew")
def renew(
    folder: Annotated[Path, typer.Argument(help="That init wrote, with its ca.")],
    days: Days = 365,
) -> None:
    """Make a new key and certificate for the server, before the old one ends.

    [bold]Example[/bold]

    fedblend federation renew lab
    """
    require_extra()
    from fedblend.deploy.ops import provision

    provision.renew(folder, days=days)
    server = folder / "server"
    typer.echo(f"wrote {server / 'server.key'} and {server / 'server.crt'}")


@app.command("doctor")
def doctor(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="server.toml, node.toml, or a folder with them."
        ),
    ] = Path(),
) -> None:
    """Look for what makes a federation unsafe; exit code 2 if there is something.

    Files, keys and certificates are read, and the public address is asked what it
    answers to a stranger.

    [bold]Example[/bold]

    fedblend federation doctor node.toml
    """
    require_extra()
    from fedblend.deploy.ops.doctor.doctor import examine

    findings = examine(path)
    for finding in findings:
        typer.echo(str(finding))
    faults = sum(finding.fault for finding in findings)
    typer.echo(f"{faults} faults, {len(findings) - faults} warnings")
    if faults:
        raise typer.Exit(screen.BAD_INPUT)


@app.command("audit")
def audit(
    file: Annotated[Path, typer.Argument(help="An audit file, audit.jsonl.")],
    head: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="A hash that was once the newest."),
    ] = None,
) -> None:
    """Check that no line of an audit was changed, removed or swapped.

    Lines cut off at its end show only against a hash that the other side was told.

    [bold]Example[/bold]

    fedblend federation audit state/audit.jsonl
    """
    from fedblend.deploy.ops.audit import verify

    found = verify(file, head)
    typer.echo(f"{file}: {found.lines} lines, unbroken; newest hash {found.head}")


NodeSettings = Annotated[Path, typer.Argument(metavar="FILE", help="node.toml.")]
ServerSettings = Annotated[
    Path, typer.Argument(metavar="FILE", help="server.toml that init wrote.")
]


def server_settings(path: Path) -> "Server":
    """The settings of a server, from its file."""
    from fedblend.deploy.ops.settings import Server, load_as

    return load_as(Server, path)


@app.command("server")
def server(settings: ServerSettings = Path("server.toml")) -> None:
    """Keep the link running that nodes and experiments meet at; Ctrl-C ends it.

    [bold]Example[/bold]

    fedblend federation server server.toml
    """
    require_extra()
    from fedblend.deploy.ops.supervisor import serve_link

    known = server_settings(settings)
    names = ", ".join(node.name for node in known.nodes)
    serve_link(
        known,
        ready=lambda: typer.echo(f"link at {known.link}; nodes {names} may come"),
        say=lambda line: typer.echo(line, err=True),
    )


@app.command("node")
def node(
    settings: NodeSettings = Path("node.toml"),
    carrier_only: Annotated[
        bool,
        typer.Option(
            "--carrier-only", help="Flower's half alone; door is run by another user."
        ),
    ] = False,
) -> None:
    """Keep a node running; Ctrl-C ends it.

    [bold]Example[/bold]

    fedblend federation node node.toml
    """
    require_extra()
    from fedblend.deploy.ops.settings import Node, load_as
    from fedblend.deploy.ops.supervisor import serve_node

    known = load_as(Node, settings)
    typer.echo(f"client {known.client} of {known.server}; logs in {known.flower}")
    serve_node(
        known,
        settings,
        carrier_only=carrier_only,
        say=lambda line: typer.echo(line, err=True),
    )


@app.command("door")
def door(
    settings: NodeSettings = Path("node.toml"),
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Users who may hand messages in, too."),
    ] = None,
) -> None:
    """Answer a node's messages, as the user who may read its rows.

    node starts it by itself, unless it is told --carrier-only: then Flower's half,
    which runs what the server hands it, is another user's and reads no rows or states.

    [bold]Example[/bold]

    fedblend federation door node.toml --group fedblend-carrier
    """
    require_extra()
    from fedblend.deploy.ops.supervisor import serve_door

    screen.compile_cache()
    serve_door(settings, group)


AtServer = Annotated[
    Path, typer.Option("--server", metavar="FILE", help="server.toml.")
]


@app.command("run")
def run(
    file: Annotated[Path, typer.Argument(help="The TOML file of the experiment.")],
    settings: AtServer = Path("server.toml"),
    out: Annotated[
        Path | None, typer.Option(help="Folder of results; runs/NAME by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where it stopped.")
    ] = False,
    again: Annotated[
        list[int] | None,
        typer.Option(
            "--enroll-again", metavar="N", help="A client that has lost its state."
        ),
    ] = None,
) -> None:
    """Run an experiment on the nodes, and write results to a folder.

    On the machine of the server, while fedblend federation server runs. A server that
    dies meanwhile is started anew and goes on.

    [bold]Example[/bold]

    fedblend federation run trial.toml --server server.toml --out runs/trial
    """
    require_extra()
    from fedblend.cli.run import results_folder, show_summary
    from fedblend.config.config import load
    from fedblend.deploy.ops import submit
    from fedblend.experiments import run_folder

    config, known = load(file), server_settings(settings)
    out = out or results_folder(config)
    submit.open_folder(out, config, known, resume, again or [])
    last = -1

    def on_step(round: int, rounds: int) -> None:
        nonlocal last
        if round != last:
            last = round
            screen.note(f"round {round} of {rounds}")

    try:
        submit.run_experiment(known, out, on_step=on_step, say=screen.note)
    except KeyboardInterrupt:
        screen.note(
            f"no longer looked after, the experiment goes on; fedblend federation stop "
            f"{out} ends it, the same command with --resume sees it through"
        )
        raise typer.Exit(screen.INTERRUPTED) from None
    show_summary(out, run_folder.read_summary(run_folder.Folder(out)))
