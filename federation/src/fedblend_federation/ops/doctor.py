# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether this machine is fit to take part: its settings, files, rows and services.

What a program reads at its start is read here by the same functions.

A finding has a place, a value and advice.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from fedblend.data.dataset import DataError
from fedblend.data.readers.read import read_raw
from fedblend.data.readers.tables import FILES
from fedblend.errors import ConfigError, RunError
from fedblend_federation import worker
from fedblend_federation.flower import processes
from fedblend_federation.flower.port_guard import is_open
from fedblend_federation.ops import key_files, probes
from fedblend_federation.ops.probes import (
    COPY,
    MAKE,
    Finding,
    catch_unreadable,
    link_findings,
    owner,
    permissions,
    public_findings,
    usable,
)
from fedblend_federation.ops.registration import unknown_nodes
from fedblend_federation.ops.settings import (
    ClientSettings,
    NodeSettings,
    ServerSettings,
    is_loopback,
    load,
)
from fedblend_federation.ops.supervisor import is_up
from fedblend_federation.policy.policy import Policy, load_policy
from fedblend_federation.secure.roster import keys_of


def examine(path: Path) -> list[Finding]:
    """Look at settings, and at what they name, on disk and on the network.

    What this user may not look at is a warning.

    Args:
        path: ``server.toml``, ``node.toml``, or a folder that has some.

    Raises:
        ConfigError: settings that cannot be read.
    """
    checks: list[Iterable[Finding]] = []
    for file in _settings_in(path):
        settings = load(file)
        server = isinstance(settings, ServerSettings)
        checks += _server(settings) if server else _node(settings)
    found = [finding for check in checks for finding in catch_unreadable(check)]
    return list(dict.fromkeys(found))


def _settings_in(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        names = ("server.toml", "node.toml", "server/server.toml", "nodes/*/node.toml")
        files = [file for name in names for file in sorted(path.glob(name))]
    except PermissionError:
        advice = f"run the doctor as {owner(path)} or root"
        raise RunError(f"{path}: Permission denied; {advice}") from None
    if not files:
        raise RunError(f"{path}: has neither server.toml nor node.toml")
    return files


def _server(settings: ServerSettings) -> Iterator[Iterable[Finding]]:
    if not is_loopback(settings.link.host):
        yield [
            Finding(
                "the link is not on loopback",
                "link",
                str(settings.link),
                "it serves everyone who reaches it; write 127.0.0.1:8000",
            )
        ]
    yield probes.secret(settings.key, COPY)
    yield permissions("state folder", settings.folder, 0o700)
    yield probes.authority(settings.ca)
    yield probes.certificate(settings)
    advice = "fedblend federation roster puts it there, from public.toml of the node"
    for node in settings.nodes:
        yield usable("public key", node.key, key_files.public_node_key, advice)
    yield public_findings(settings.address, settings.ca)
    yield link_findings(settings.address, settings.link)
    yield link_service(settings)


def _node(settings: NodeSettings) -> Iterator[Iterable[Finding]]:
    yield probes.secret(settings.key, f"{MAKE} makes it")
    yield permissions("state folder", settings.folder, 0o700)
    yield permissions("state folder", settings.flower_folder, 0o700)
    # Who can write there could stand in for the worker.
    socket = settings.worker_socket.parent
    yield permissions("folder of the socket", socket, 0o750, wrong=0o022)
    clients = settings.client_settings().values()
    for own in clients:
        yield permissions("file of rows", own.data.file, 0o600)
    yield _separation(settings)
    yield probes.authority(settings.ca)
    if settings.key.exists():
        advice = f"remove it; {MAKE} makes another one"
        yield usable("key", settings.key, key_files.node_key, advice)
    for policy in sorted({own.policy for own in clients}):
        yield _policy(policy)
    for own in clients:
        yield _roster(own)
        yield _rows(own)
    yield worker_service(settings)
    yield public_findings(settings.server, settings.ca)


def _roster(settings: ClientSettings) -> Iterator[Finding]:
    """Whether the key for secure sums is that of the roster, where there is one."""
    roster = settings.roster
    if roster is None or settings.secure_key is None:
        return
    yield from probes.secret(settings.secure_key, f"{MAKE} makes it")
    if roster.exists():
        advice = f"compare fingerprints: {MAKE}"
        what = "keys of secure sums"
        yield from usable(what, roster, lambda path: keys_of(settings), advice)
    else:
        advice = "get it from whoever runs the server, if sums are to be secure"
        where, value = str(roster), "no such file"
        yield Finding("roster is missing", where, value, advice, fault=False)


def _policy(path: Path) -> Iterator[Finding]:
    policy = yield from usable("policy", path, load_policy, "correct the file")
    if policy is not None and not policy.protect.rows.noise:
        what, value = "rows are not hidden", "protect.rows.noise is 0"
        advice = "one message may hold nearly all rows of this node; set a noise"
        yield Finding(what, "policy", value, advice, fault=False)


def _rows(settings: ClientSettings) -> Iterator[Finding]:
    """Whether there are rows, with the target and with numbers in other columns."""
    data, where = settings.data, str(settings.data.file)
    if not data.file.exists():
        advice = "put the node's rows there, or name them in [data]"
        yield Finding("rows are missing", where, "no such file", advice, fault=False)
        return
    if data.file.is_file():
        data.file.open("rb").close()
    try:
        policy = load_policy(settings.policy)
    except ConfigError:
        policy = Policy()
    columns, inputs = policy.rows.columns, data.inputs
    if data.file.suffix in FILES and isinstance(columns, list):
        inputs = columns
    raw = "auto" if policy.discloses_statistics else "none"
    try:
        found = read_raw(data.file, data.target, data.client, inputs, raw)
        rows = len(found.targets)
    except DataError as error:
        value = str(error).removeprefix(f"{where}: ")
        advice = "correct the file, [data] of node.toml, or rows.columns of the policy"
        # An experiment may do without the columns that are no numbers.
        some = columns == "any" and data.target is not None
        yield Finding("rows cannot be used", where, value, advice, fault=not some)
        return
    least = policy.accept.fewest_rows
    if rows < least:
        value, advice = f"{rows}, accept.fewest_rows is {least}", "add rows"
        yield Finding("too few rows to take part", where, value, advice, fault=False)


def _separation(settings: NodeSettings) -> Iterator[Finding]:
    """Whether code that the server sends could read the rows."""
    places = (settings.folder, settings.flower_folder)
    if settings.supernode and all(place.exists() for place in places):
        users = [place.stat().st_uid for place in places]
        if len(set(users)) == 1:
            yield Finding(
                "one user has the rows and runs code that the server sends",
                str(settings.flower_folder),
                f"user {users[0]}",
                "give it to a user of its own, as DIR/README.md of init says",
                fault=False,
            )


WORKER_ANSWERS = 10.0
"""Seconds within which a worker answers that is not computing."""


def link_service(settings: ServerSettings) -> Iterator[Finding]:
    """Whether the link is up, serves nobody else here, and knows the nodes' keys."""
    where = str(settings.link)
    if not is_up(settings):
        advice = "start it: systemctl start fedblend-link"
        yield Finding("the link is not up", where, "no answer", advice, fault=False)
        return
    if is_loopback(settings.link.host) and is_open(settings.link, settings.ca):
        yield Finding(
            "is open to every user of this machine",
            f"https://{settings.link}/v1/control/",
            "calls that start runs are answered",
            "start the link with fedblend federation server",
        )
    try:
        processes.connect(settings)
        strangers = unknown_nodes(settings)
    except RunError as error:
        advice = f"run the doctor as {owner(settings.folder)} or root"
        what = "the link was not asked for its keys"
        yield Finding(what, where, str(error), advice, fault=False)
        return
    for node in strangers:
        what, value = f"the link does not know {node.name}", "another key, or none"
        advice = "restart the link: systemctl restart fedblend-link"
        yield Finding(what, str(node.key), value, advice)


def worker_service(settings: NodeSettings) -> Iterator[Finding]:
    """Whether the worker answers; a node of one process has none."""
    socket = settings.worker_socket
    if not socket.exists() and (settings.folder / "carrier.lock").exists():
        return
    try:
        worker.request(socket, b"", WORKER_ANSWERS)
    except worker.SocketError as error:
        why = error.__context__
        if isinstance(why, PermissionError):
            raise PermissionError(why.errno, why.strerror, str(socket)) from None
        value = str(error).removeprefix(f"{socket}: ")
        advice = "unless it computes, start it: systemctl restart fedblend-worker"
        what = "the worker does not answer"
        yield Finding(what, str(socket), value, advice, fault=False)
