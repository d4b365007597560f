# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend federation``: the machines of a federation: keys, services, checks."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen

if TYPE_CHECKING:
    from fedblend_federation.ops.settings import ServerSettings

app = typer.Typer(
    help="Set up and look after a real federation.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Days = Annotated[
    int, typer.Option(metavar="N", help="Days for which the certificate is valid.")
]
NodePath = Annotated[
    Path, typer.Argument(metavar="FILE", help="Settings of the node, node.toml.")
]
ServerPath = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Settings of the server, the server.toml that init wrote."
    ),
]
ON_THIS_MACHINE = """\
to try it on this machine:
  fedblend federation server {0}/server/server.toml &
  for node in {0}/nodes/*; do fedblend federation node "$node/node.toml" & done
  fedblend federation run {0}/server/trial.toml"""


@app.command()
def describe(
    file: Annotated[Path, typer.Argument(help="A .csv or .parquet table.")],
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column with the client of each row."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column to predict.")
    ] = None,
) -> None:
    """Print the data table of a federation whose nodes have tables like this one.

    [bold]Example[/bold]

    fedblend federation describe hospitals.csv --client hospital --target outcome
    """
    import numpy as np

    from fedblend.data.readers.read import read
    from fedblend_federation.raw_tables import data_of_nodes

    dataset = read(file, target=target, client=client)
    clients = 1 if dataset.keys is None else len(np.unique(dataset.keys))
    typer.echo(data_of_nodes(dataset, clients))


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Host name or IP address of the server, as nodes reach it.",
        ),
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Names of the nodes.")
    ] = None,
    found: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Folder of fedblend auto, for a trial of the method that it found; "
            "on this machine unless --host is given.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Port of the proxy, which nodes reach; default: 443."
        ),
    ] = None,
    link_port: Annotated[
        int,
        typer.Option(
            metavar="N", help="Port of the link behind the proxy, on loopback."
        ),
    ] = 8000,
    days: Days = 365,
    clients_per_node: Annotated[
        int, typer.Option(metavar="N", help="Number of clients that each node hosts.")
    ] = 1,
    with_keys: Annotated[
        bool,
        typer.Option(
            "--with-keys",
            help="Make the private keys of the nodes, too; for trials only.",
        ),
    ] = False,
) -> None:
    """Make certificates and settings for a server and its nodes.

    What goes where is in README.md of the folder. Nodes make their own keys, with
    fedblend federation keys.

    [bold]Examples[/bold]

    fedblend federation init lab --host fl.example.org --nodes alice,bob,carol

    fedblend federation init trial --from runs/heart --with-keys
    """
    from fedblend.errors import RunError
    from fedblend_federation.ops.from_auto import trial_of
    from fedblend_federation.ops.provision import provision

    trial = None if found is None else trial_of(found)
    for option, value in {"--host": host, "--nodes": nodes}.items():
        if value is None and trial is None:
            raise RunError(f"{option}: is missing; --from needs none")
    if trial is not None and (nodes is not None or clients_per_node > 1):
        raise RunError("--nodes, --clients-per-node: --from has a node for each client")
    names = [name.strip() for name in (nodes or "").split(",")]
    if trial is not None:
        names = list(trial.rows)
    # On one machine no proxy is needed: nodes reach the link itself.
    usual = link_port if host is None else 443
    provision(
        folder,
        host=host or "127.0.0.1",
        nodes=names,
        port=usual if port is None else port,
        link_port=link_port,
        days=days,
        clients_per_node=clients_per_node,
        with_keys=with_keys,
        trial=trial,
    )
    if trial is not None:
        typer.echo(f"a trial of {trial.method}: {folder / 'server' / 'trial.toml'}")
        for line in trial.warnings:
            screen.warn(line)
    typer.echo(f"wrote {folder} for {len(names)} nodes; read {folder / 'README.md'}")
    if with_keys:
        typer.echo(
            f"whoever has {folder} can open what any node masks, and pose as any node"
        )
    if trial is not None and with_keys and host is None:
        typer.echo(ON_THIS_MACHINE.format(shlex.quote(str(folder))))


@app.command()
def keys(settings: NodePath = Path("node.toml")) -> None:
    """Make the keys of a node, on the node, and show fingerprints to compare.

    No key that is there is overwritten. The public halves are in public.toml beside
    the file, for fedblend federation roster. Where the node has a roster.toml, the
    fingerprints of all nodes are shown: compare them with those that the others see on
    their nodes, over the phone.

    [bold]Example[/bold]

    fedblend federation keys node.toml
    """
    from fedblend_federation.ops import credentials
    from fedblend_federation.ops.settings import NodeSettings, load_as
    from fedblend_federation.secure.roster import Roster, keys_of

    public, made = credentials.make_keys(settings)
    names = ", ".join(path.name for path in made) or "no key; all were there"
    typer.echo(f"made {names}; hand over {settings.parent / credentials.PUBLIC}")
    typer.echo(str(credentials.own_print(public)))
    known = load_as(NodeSettings, settings)
    if known.roster is not None and known.roster.exists():
        for own in known.client_settings().values():
            keys_of(own)
        typer.echo(f"all nodes of {known.roster.name}:")
        for one in credentials.prints_of_roster(load_as(Roster, known.roster)):
            typer.echo(str(one))


@app.command()
def roster(
    settings: ServerPath,
    public: Annotated[
        list[Path],
        typer.Argument(metavar="PUBLIC...", help="The public.toml of every node."),
    ],
) -> None:
    """Collect the public keys of nodes into roster.toml, and show fingerprints.

    Also writes the keys by which the link knows the nodes. Every node needs a copy of
    roster.toml for secure sums, and the operators of all nodes compare fingerprints.

    [bold]Example[/bold]

    fedblend federation roster server.toml alice.toml bob.toml carol.toml
    """
    from fedblend_federation.ops import credentials

    found = credentials.collect(settings, public)
    for one in found:
        typer.echo(str(one))
    wanted = [node.name for node in server_settings(settings).nodes]
    missing = set(wanted) - {one.name for one in found}
    more = f"; missing: {', '.join(sorted(missing))}" if missing else ""
    typer.echo(f"wrote {settings.parent / credentials.ROSTER}, for every node{more}")


@app.command()
def renew(
    folder: Annotated[
        Path, typer.Argument(help="Folder that init wrote, with its subfolder ca.")
    ],
    days: Days = 365,
) -> None:
    """Make a new key and certificate for the server, before the old one ends.

    [bold]Example[/bold]

    fedblend federation renew lab
    """
    from fedblend_federation.ops import provision

    provision.renew(folder, days=days)
    server = folder / "server"
    typer.echo(f"wrote {server / 'server.key'} and {server / 'server.crt'}")


@app.command()
def doctor(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="server.toml, node.toml, or a folder with them."
        ),
    ] = Path(),
) -> None:
    """Look for what makes a federation unsafe; exit code 2 if there is a fault.

    Reads files, keys and certificates, and sends requests without credentials to the
    public address.

    [bold]Example[/bold]

    fedblend federation doctor node.toml
    """
    from fedblend_federation.ops.doctor import examine

    findings = examine(path)
    for finding in findings:
        typer.echo(str(finding))
    faults = sum(finding.fault for finding in findings)
    typer.echo(f"{faults} faults, {len(findings) - faults} warnings")
    if faults:
        raise typer.Exit(screen.BAD_INPUT)


@app.command()
def audit(
    file: Annotated[Path, typer.Argument(help="Audit to check, audit.jsonl.")],
    head: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Hash of a line that was once the newest."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Audit of the other side, to compare with."),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Client whose audit FILE is, if --against is the server's.",
        ),
    ] = None,
) -> None:
    """Check that no line of an audit was changed, removed or swapped.

    Lines cut off at its end show only against what the other side received: its audit
    has the hashes of this one.

    [bold]Examples[/bold]

    fedblend federation audit state/audit.jsonl

    fedblend federation audit alice.jsonl --against runs/trial/audit.jsonl --client 0
    """
    from fedblend.errors import RunError
    from fedblend_federation.ops.audit import heads_told, verify

    heads = {head} if head else set()
    if against is not None:
        told = heads_told(against, client)
        if not told:
            raise RunError(f"{against}: has no hash of {file}; is --client right?")
        heads |= told
    found = verify(file, heads)
    known = f", {len(heads)} hashes of the other side found" if heads else ""
    typer.echo(
        f"{file}: {found.lines} lines, unbroken{known}; newest hash {found.head}"
    )


HostedClient = Annotated[
    int | None,
    typer.Option(metavar="N", help="Client of a node that hosts several."),
]


@app.command()
def ledger(settings: NodePath = Path("node.toml"), client: HostedClient = None) -> None:
    """Show what a node gave away: answers, rows, measurements, epsilon.

    [bold]Example[/bold]

    fedblend federation ledger node.toml
    """
    from fedblend_federation.client.ledger import ledger_lines
    from fedblend_federation.ops.settings import client_at

    for line in ledger_lines(client_at(settings, client).folder):
        typer.echo(line)


def server_settings(path: Path) -> "ServerSettings":
    """The settings of a server, from its file."""
    from fedblend_federation.ops.settings import ServerSettings, load_as

    return load_as(ServerSettings, path)


@app.command()
def server(settings: ServerPath = Path("server.toml")) -> None:
    """Run the link that nodes and experiments connect to; Ctrl-C ends it.

    [bold]Example[/bold]

    fedblend federation server server.toml
    """
    from fedblend_federation.ops.supervisor import serve_link

    known = server_settings(settings)
    names = ", ".join(node.name for node in known.nodes)
    up = f"link at {known.link}; nodes {names} may connect"
    serve_link(known, lambda: typer.echo(up))


@app.command()
def node(
    settings: NodePath = Path("node.toml"),
    flower_only: Annotated[
        bool,
        typer.Option(
            "--flower-only",
            help="Run without access to rows; another user runs the worker.",
        ),
    ] = False,
    supernode: Annotated[
        bool,
        typer.Option(
            "--supernode",
            help=(
                "Run Flower's SuperNode, which runs the server's app and needs a "
                "worker."
            ),
        ),
    ] = False,
) -> None:
    """Run a node; Ctrl-C ends it.

    [bold]Example[/bold]

    fedblend federation node node.toml
    """
    from fedblend_federation.ops import supervisor
    from fedblend_federation.ops.settings import NodeSettings, load_as, name_clients

    known = load_as(NodeSettings, settings)
    typer.echo(f"{name_clients(known.client_ids)} of {known.server}")
    if supernode or known.supernode:
        supervisor.serve_supernode(known)
    if not flower_only:
        screen.compile_cache()
    supervisor.serve_carrier(
        known,
        with_rows=not flower_only,
        log=lambda line: typer.echo(line, err=True),
    )


@app.command()
def worker(
    settings: NodePath = Path("node.toml"),
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Group of users who may connect, too."),
    ] = None,
) -> None:
    """Reply to a node's messages, as the user who may read its rows.

    node needs no worker, unless it runs with --flower-only: then the half with the
    network belongs to another user, who can read neither rows nor states.

    [bold]Example[/bold]

    fedblend federation worker node.toml --group fedblend-flower
    """
    from fedblend_federation.ops.supervisor import serve_worker

    screen.compile_cache()
    serve_worker(settings, group)
