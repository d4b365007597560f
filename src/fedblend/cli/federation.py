# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation``: a real federation, from its keys to its audit."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen

app = typer.Typer(
    help="Set up and look after a real federation.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Days = Annotated[
    int, typer.Option(metavar="N", help="How long the certificate is valid.")
]


def _complete() -> None:
    """Say what is missing where the extra is not installed."""
    from importlib.util import find_spec

    from fedblend.experiment.section import RunError

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
    days: Days = 365,
) -> None:
    """Make keys, certificates and settings for a server and its nodes.

    What goes where is in README.md of the folder.

    [bold]Example[/bold]

    fedblend federation init lab --host fl.example.org --nodes alice,bob,carol
    """
    _complete()
    from fedblend.experiment.federation.init import found

    names = [name.strip() for name in nodes.split(",")]
    found(folder, host=host, nodes=names, port=port, days=days)
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
    _complete()
    from fedblend.experiment.federation import init

    init.renew(folder, days=days)
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
    _complete()
    from fedblend.experiment.federation.doctor import examine

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
    from fedblend.experiment.federation.audit import verify

    found = verify(file, head)
    typer.echo(f"{file}: {found.lines} lines, unbroken; newest hash {found.head}")
