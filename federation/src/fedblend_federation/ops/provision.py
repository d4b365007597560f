# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A new federation: certificates and settings for the server and every node."""

import base64
import io
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedblend import __version__
from fedblend.config.toml import literal, visible
from fedblend.errors import RunError
from fedblend_federation.flower.processes import environment
from fedblend_federation.ops import credentials
from fedblend_federation.ops.credentials import (
    HOME,
    PROGRAM,
    PUBLIC,
    ROSTER,
    collect,
    make_keys,
    render,
    write_private,
)
from fedblend_federation.ops.from_auto import Trial
from fedblend_federation.ops.settings import (
    CLIENT,
    HOST_RULE,
    NAME_RULE,
    Address,
    ServerSettings,
    is_host,
    is_name,
    load_as,
    name_clients,
)

MAX_DAYS = 825
"""TLS clients have begun to refuse a server's certificate that is valid for longer."""
MAX_HOSTED = 10_000
"""Clients of one node."""
_NGINX_THERE = (
    'if [ -z "$ROOT" ] && ! command -v nginx >/dev/null; then\n'
    '    command -v apt-get >/dev/null || fail "nginx: is missing; install it first"\n'
    '    echo "installing nginx"\n'
    "    apt-get install --yes --quiet nginx >/dev/null\n"
    "fi"
)


def provision(
    folder: Path,
    *,
    host: str,
    nodes: Sequence[str],
    port: int = 443,
    link_port: int = 8000,
    days: int = 365,
    clients_per_node: int = 1,
    with_keys: bool = False,
    trial: Trial | None = None,
) -> None:
    """Write the certificates and settings of all machines of a federation.

    Args:
        folder: where it goes; must not exist, or be empty.
        host: the name or IP address by which nodes reach the server.
        nodes: a name for each node; client ids are given in this order.
        port: of the proxy on that host.
        link_port: of the link behind it, on loopback.
        days: how long the server's certificate is valid.
        clients_per_node: clients that each node hosts.
        with_keys: make the keys of all nodes here, for a trial. Whoever has this folder
            can then open what any node sends.
        trial: the experiment, policy and rows, where these are known.

    Raises:
        RunError: one line that says what is wrong.
    """
    _check_number("--port", port, 65535)
    _check_number("--clients-per-node", clients_per_node, MAX_HOSTED)
    _check_number("--link-port", link_port, 65535)
    _check(folder, host, nodes, days)
    address, link = Address(host, port), Address("127.0.0.1", link_port)
    signer = credentials.authority("fedblend federation")
    _folders(folder, nodes)
    write_private(folder / "ca", {"ca.key": signer.key, "ca.crt": signer.public})
    clients = {
        name: range(number * clients_per_node, (number + 1) * clients_per_node)
        for number, name in enumerate(nodes)
    }
    usage = _usage(clients_per_node)
    table = "".join(
        f"| `{name}.sh` | the machine of {name} ({name_clients(own)}) | "
        f"`sh {name}.sh{usage}` |\n"
        for name, own in clients.items()
    )
    readme = render("README.md", address=address, rows=table)
    write_private(folder, {"README.md": readme})
    server = folder / "server"
    write_private(
        server,
        {
            "ca.crt": signer.public,
            "server.toml": _server_toml(address, link, clients),
            "nginx.conf": _nginx(address, link),
            "trial.toml": trial.experiment
            if trial
            else render("trial.toml", clients=len(nodes) * clients_per_node),
            "fedblend-link.service": _unit("link", HOME / "server" / "state"),
        },
    )
    _certify(server, signer, host, days)
    for name, own in clients.items():
        write_private(
            folder / "nodes" / name,
            {
                "ca.crt": signer.public,
                "node.toml": _node_toml(address, own, trial and trial.target),
                "policy.toml": trial.policy if trial else render("policy.toml"),
                "fedblend-worker.service": _unit("worker", HOME / "node" / "state"),
                "fedblend-node.service": _unit("node", HOME / "node" / "flower"),
            },
        )
    if with_keys:
        _make_all_keys(folder, nodes)
    for name, own in clients.items():
        script = folder / f"{name}.sh"
        _script(folder / "nodes" / name, script, name, address, len(own))
    _script(server, folder / "server.sh", None, address)
    # Not in the scripts: on its own machine a node has its own rows.
    for name, text in (trial.rows if trial else {}).items():
        write_private(folder / "nodes" / name, {"rows.csv": text})


def _make_all_keys(folder: Path, nodes: Sequence[str]) -> None:
    """What operators do on their machines, for all of them."""
    homes = [folder / "nodes" / name for name in nodes]
    for home in homes:
        make_keys(home / "node.toml")
    collect(folder / "server" / "server.toml", [home / PUBLIC for home in homes])
    roster = (folder / "server" / ROSTER).read_bytes()
    for home in homes:
        write_private(home, {ROSTER: roster})


def _usage(clients: int) -> str:
    rows = "ROWS.csv" if clients == 1 else "FOLDER"
    return f" --rows {rows} --target COLUMN"


def _script(
    folder: Path, script: Path, node: str | None, address: Address, clients: int = 1
) -> None:
    """A script that sets up a machine: the files of its folder are in it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, path.relative_to(folder), recursive=False)
    kind = "server" if node is None else "node"
    text = render(
        "install.sh",
        what="the server" if node is None else f"the node {node}",
        address=address,
        file=script.name,
        usage="" if node is None else _usage(clients),
        several="yes" if clients > 1 else "no",
        version=__version__,
        folder=kind,
        bin=PROGRAM.parent,
        check=_NGINX_THERE if node is None else "",
        install=render(f"install_{kind}.sh").decode().rstrip(),
    )
    write_private(
        script.parent, {script.name: text + base64.encodebytes(packed.getvalue())}
    )


def _node_toml(address: Address, clients: Sequence[int], target: str | None) -> bytes:
    file = "rows.csv" if len(clients) == 1 else f"rows/{CLIENT}.csv"
    text = render(
        "node.toml",
        address=address,
        clients=_clients_line(clients),
        file=file,
        secure_key="secure.key" if len(clients) == 1 else f"secure-{CLIENT}.key",
    )
    if target is None:
        return text
    line = f"target = {literal(target)}".encode()
    return re.sub(rb'^# target = "label" .*', lambda _: line, text, flags=re.M)


def _clients_line(clients: Sequence[int]) -> str:
    if len(clients) == 1:
        return f"client = {clients[0]}"
    return f"clients = {list(clients)}"


def _server_toml(
    address: Address, link: Address, nodes: Mapping[str, Sequence[int]]
) -> bytes:
    entries = "".join(
        f'\n[[nodes]]\nname = "{name}"\nkey = "nodes/{name}.pub"\n'
        f"{_clients_line(own)}\n"
        for name, own in nodes.items()
    )
    return render("server.toml", address=address, link=link, nodes=entries)


def _nginx(address: Address, link: Address) -> bytes:
    six = ":" in address.host
    listen = f"[::]:{address.port}" if six else address.port
    name = f"[{address.host}]" if six else address.host
    return render("nginx.conf", name=name, listen=listen, link=link)


def _unit(name: str, state: Path) -> bytes:
    """A unit of systemd whose program keeps its state in a folder."""
    variables = {
        **environment(state),
        # There is no home to write to: caches go where the state is.
        "XDG_CACHE_HOME": str(state / "cache"),
        # Flower looks for its own programs by name.
        "PATH": f"{PROGRAM.parent}:/usr/bin:/bin",
    }
    lines = "\n".join(f"Environment={key}={value}" for key, value in variables.items())
    return render(f"fedblend-{name}.service", environment=lines)


def renew(folder: Path, *, days: int = 365) -> None:
    """A new key and certificate for the server of a federation, by its authority."""
    _check_number("--days", days, MAX_DAYS)
    settings = load_as(ServerSettings, folder / "server" / "server.toml")
    try:
        key = (folder / "ca" / "ca.key").read_bytes()
        public = (folder / "ca" / "ca.crt").read_bytes()
    except OSError as error:
        raise RunError(
            f"{error.filename}: {error.strerror}; renewing needs the folder that "
            "fedblend federation init made, with its ca"
        ) from None
    signer = credentials.Pair(key, public)
    _certify(folder / "server", signer, settings.address.host, days)


def _certify(server: Path, signer: credentials.Pair, host: str, days: int) -> None:
    pair = credentials.server_certificate(signer, host, days)
    write_private(server, {"server.key": pair.key, "server.crt": pair.public})


def _check(folder: Path, host: str, nodes: Sequence[str], days: int) -> None:
    if not is_host(host):
        raise RunError(f'--host: "{visible(host)}" is not {HOST_RULE}')
    _check_number("--days", days, MAX_DAYS)
    if not nodes:
        raise RunError("--nodes: no node is named; write --nodes alice,bob")
    for name in nodes:
        if name in ("server", "ca", "nodes"):
            raise RunError(f'--nodes: "{name}" is a folder of the federation')
        if not is_name(name):
            raise RunError(f'--nodes: "{visible(name)}" is not {NAME_RULE}')
        if list(nodes).count(name) > 1:
            raise RunError(f'--nodes: "{name}" is named twice')
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is not a folder")
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder}: is not empty, and nothing in it is overwritten")


def _check_number(option: str, number: int, most: int) -> None:
    if not 0 < number <= most:
        raise RunError(f"{option}: {number} is not between 1 and {most}")


def _folders(folder: Path, nodes: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    inside = ["ca", "server", "server/nodes", "server/state", "server/runs", "nodes"]
    inside.append("server/bases")
    for name in nodes:
        own = ("", "/state", "/flower", "/worker", "/bases")
        inside += [f"nodes/{name}{folder}" for folder in own]
    for path in (folder, *(folder / name for name in inside)):
        path.mkdir(exist_ok=True)
        path.chmod(0o700)
