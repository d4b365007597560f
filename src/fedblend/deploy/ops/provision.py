# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A new federation: keys, certificates and settings for the server and every node.

The files of ``templates`` are nginx, systemd and TOML as those programs read them, with
``@name@`` where a value goes.
"""

import base64
import io
import os
import re
import tarfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fedblend import __version__
from fedblend.config.toml import visible
from fedblend.deploy.ops import certificates
from fedblend.deploy.ops.flwr_processes import environment
from fedblend.deploy.ops.settings import (
    HOST_RULE,
    NAME_RULE,
    Address,
    ServerSettings,
    is_host,
    is_name,
    load_as,
)
from fedblend.errors import RunError

MAX_DAYS = 825
"""TLS clients have begun to refuse a server's certificate that is valid for longer."""
HOME = Path("/var/lib/fedblend")
"""Where the units and the proxy expect the files of a machine."""
PROGRAM = Path("/opt/fedblend/bin/fedblend")
"""Where fedblend is installed."""
_NGINX_THERE = (
    'if [ -z "$ROOT" ] && ! command -v nginx >/dev/null; then\n'
    '    command -v apt-get >/dev/null || fail "nginx: is missing; install it first"\n'
    '    echo "installing nginx"\n'
    "    apt-get install --yes --quiet nginx >/dev/null\n"
    "fi"
)
USER, FLOWER_USER = "fedblend", "fedblend-flower"
"""Who owns rows and states, and who runs the SuperNode of a node."""


def provision(
    folder: Path,
    *,
    host: str,
    nodes: Sequence[str],
    port: int = 443,
    link_port: int = 8000,
    days: int = 365,
) -> None:
    """Write the keys, certificates and settings of all machines of a federation.

    Args:
        folder: where it goes; must not exist, or be empty.
        host: the name or IP address by which nodes reach the server.
        nodes: a name for each node; client ids are given in this order.
        port: of the proxy on that host.
        link_port: of the link behind it, on loopback.
        days: how long the server's certificate is valid.

    Raises:
        RunError: one line that says what is wrong.
    """
    _check_port("--port", port)
    _check_port("--link-port", link_port)
    _check(folder, host, nodes, days)
    address, link = Address(host, port), Address("127.0.0.1", link_port)
    signer = certificates.authority("fedblend federation")
    _folders(folder, nodes)
    _write(folder / "ca", {"ca.key": signer.key, "ca.crt": signer.public})
    table = "".join(
        f"| `{name}.sh` | the machine of {name} (client {client}) | "
        f"`sh {name}.sh --rows ROWS.csv --target COLUMN` |\n"
        for client, name in enumerate(nodes)
    )
    _write(folder, {"README.md": render("README.md", address=address, rows=table)})
    server = folder / "server"
    _write(
        server,
        {
            "ca.crt": signer.public,
            "server.toml": _server_toml(address, link, nodes),
            "nginx.conf": _nginx(address, link),
            "trial.toml": render("trial.toml", clients=len(nodes)),
            "fedblend-link.service": _unit("link", HOME / "server" / "state"),
        },
    )
    _certify(server, signer, host, days)
    secure = {name: certificates.secure_key() for name in nodes}
    roster = _roster_toml({name: pair.public for name, pair in secure.items()})
    for client, name in enumerate(nodes):
        pair = certificates.node_key(name)
        _write(server / "nodes", {f"{name}.pub": pair.public})
        _write(
            folder / "nodes" / name,
            {
                "node.key": pair.key,
                "node.pub": pair.public,
                "secure.key": secure[name].key,
                "roster.toml": roster,
                "ca.crt": signer.public,
                "node.toml": render("node.toml", address=address, client=client),
                "policy.toml": render("policy.toml"),
                "fedblend-worker.service": _unit("worker", HOME / "node" / "state"),
                "fedblend-node.service": _unit("node", HOME / "node" / "flower"),
            },
        )
        _bundle(folder / "nodes" / name, folder / f"{name}.sh", name, address)
    _bundle(server, folder / "server.sh", None, address)


def _bundle(folder: Path, script: Path, node: str | None, address: Address) -> None:
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
        usage="" if node is None else " --rows ROWS.csv --target COLUMN",
        version=__version__,
        folder=kind,
        bin=PROGRAM.parent,
        check=_NGINX_THERE if node is None else "",
        install=render(f"install_{kind}.sh").decode().rstrip(),
    )
    _write(script.parent, {script.name: text + base64.encodebytes(packed.getvalue())})


def template(name: str) -> str:
    """The text of a template."""
    return (resources.files("fedblend.deploy.ops") / "templates" / name).read_text(
        "utf-8"
    )


def render(name: str, /, **values: object) -> bytes:
    """A template with its values."""
    known = {
        "home": HOME,
        "program": PROGRAM,
        "user": USER,
        "flower_user": FLOWER_USER,
        **values,
    }
    return re.sub(r"@(\w+)@", lambda at: str(known[at[1]]), template(name)).encode()


def _server_toml(address: Address, link: Address, nodes: Sequence[str]) -> bytes:
    entries = "".join(
        f'\n[[nodes]]\nname = "{name}"\nkey = "nodes/{name}.pub"\nclient = {client}\n'
        for client, name in enumerate(nodes)
    )
    return render("server.toml", address=address, link=link, nodes=entries)


def _roster_toml(keys: dict[str, bytes]) -> bytes:
    """The roster of nodes with these public keys; client ids in their order."""
    entries = "".join(
        f'\n[[nodes]]\nname = "{name}"\nclient = {client}\nkey = "{key.decode()}"\n'
        for client, (name, key) in enumerate(keys.items())
    )
    return render("roster.toml", nodes=entries)


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
    _check_days(days)
    settings = load_as(ServerSettings, folder / "server" / "server.toml")
    try:
        key = (folder / "ca" / "ca.key").read_bytes()
        public = (folder / "ca" / "ca.crt").read_bytes()
    except OSError as error:
        raise RunError(
            f"{error.filename}: {error.strerror}; renewing needs the folder that "
            "fedblend federation init made, with its ca"
        ) from None
    signer = certificates.Pair(key, public)
    _certify(folder / "server", signer, settings.address.host, days)


def _certify(server: Path, signer: certificates.Pair, host: str, days: int) -> None:
    pair = certificates.server_certificate(signer, host, days)
    _write(server, {"server.key": pair.key, "server.crt": pair.public})


def _check(folder: Path, host: str, nodes: Sequence[str], days: int) -> None:
    if not is_host(host):
        raise RunError(f'--host: "{visible(host)}" is not {HOST_RULE}')
    _check_days(days)
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


def _check_port(option: str, port: int) -> None:
    if not 0 < port < 65536:
        raise RunError(f"{option}: {port} is not between 1 and 65535")


def _check_days(days: int) -> None:
    if not 0 < days <= MAX_DAYS:
        raise RunError(f"--days: {days} is not between 1 and {MAX_DAYS}")


def _folders(folder: Path, nodes: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    inside = ["ca", "server", "server/nodes", "server/state", "server/runs", "nodes"]
    for name in nodes:
        own = ("", "/state", "/flower", "/worker")
        inside += [f"nodes/{name}{folder}" for folder in own]
    for path in (folder, *(folder / name for name in inside)):
        path.mkdir(exist_ok=True)
        path.chmod(0o700)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Files that nobody else can read; a key is never readable, not even at first."""
    for name, data in files.items():
        beside = folder / f"{name}.new"
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(beside, folder / name)
