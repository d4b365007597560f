# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Is a machine fit to take part? Findings have a place, a value and advice."""

import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from fedblend.data.dataset import DataError
from fedblend.data.readers.read import read_raw
from fedblend.data.readers.tables import FILES
from fedblend.errors import ConfigError, RunError
from fedblend_federation.client.bases import (
    SUMS,
    files_in,
    named_in,
    require_base,
    sha256_of,
)
from fedblend_federation.client.policy import Policy, load_policy
from fedblend_federation.ops.doctor import credentials
from fedblend_federation.ops.doctor.credentials import COPY, MAKE, permissions, x509_at
from fedblend_federation.ops.doctor.probes import (
    Finding,
    attempted,
    link_findings,
    owner,
    public_findings,
)
from fedblend_federation.ops.doctor.services import link_service, worker_service
from fedblend_federation.ops.flwr_processes import SILENCE
from fedblend_federation.ops.settings import (
    Address,
    ClientSettings,
    NodeSettings,
    ServerSettings,
    is_loopback,
    load,
)
from fedblend_federation.secure.roster import keys_of

OLDEST, TOO_NEW = (1, 41), (1, 43)
"""Versions of Flower that fedblend was tried with: from, and below."""


def examine(path: Path, variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look at settings, and at what they name, on disk and on the network.

    What this user may not look at is a warning.

    Args:
        path: ``server.toml``, ``node.toml``, or a folder that has some.
        variables: the environment in which Flower would be started.

    Raises:
        ConfigError: settings that cannot be read.
    """
    checks: list[Iterable[Finding]] = [_flower()]
    for file in _settings_in(path):
        settings = load(file)
        server = isinstance(settings, ServerSettings)
        checks += _server(settings) if server else _node(settings)
        unit = file.parent / f"fedblend-{'link' if server else 'node'}.service"
        checks.append(_environment(unit, variables))
    found = [finding for check in checks for finding in attempted(check)]
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
    yield credentials.secret(settings.key, COPY)
    yield permissions("state folder", settings.folder, 0o700)
    yield credentials.authority(settings.ca)
    yield credentials.certificate(settings)
    for node in settings.nodes:
        yield credentials.public_key(node.key)
    yield _outside(settings.address, settings.ca)
    yield link_findings(settings.address, settings.link)
    yield _link(settings)


def _node(settings: NodeSettings) -> Iterator[Iterable[Finding]]:
    yield credentials.secret(settings.key, f"{MAKE} makes it")
    yield permissions("state folder", settings.folder, 0o700)
    yield permissions("state folder", settings.flower_folder, 0o700)
    # Who can write there could stand in for the worker.
    socket = settings.worker_socket.parent
    yield permissions("folder of the socket", socket, 0o750, wrong=0o022)
    clients = settings.client_settings().values()
    for own in clients:
        yield permissions("file of rows", own.data.file, 0o600)
    yield _separation(settings)
    yield credentials.authority(settings.ca)
    yield credentials.own_key(settings.key)
    for policy in sorted({own.policy for own in clients}):
        yield _policy(policy)
    yield _bases(settings)
    for own in clients:
        yield _roster(own)
        yield _rows(own)
    yield worker_service(settings)
    yield _outside(settings.server, settings.ca)


def _roster(settings: ClientSettings) -> Iterator[Finding]:
    """Whether the key for secure sums is that of the roster, where there is one."""
    if settings.roster is None or settings.secure_key is None:
        return
    yield from credentials.secret(settings.secure_key, f"{MAKE} makes it")
    if not settings.roster.exists():
        advice = "get it from whoever runs the server, if sums are to be secure"
        where, value = str(settings.roster), "no such file"
        yield Finding("roster is missing", where, value, advice, fault=False)
        return
    try:
        keys_of(settings)
    except ConfigError as error:
        if isinstance(error.__context__, PermissionError):
            raise error.__context__ from None
        advice = f"compare fingerprints: {MAKE}"
        yield Finding("keys of secure sums are unusable", "roster", str(error), advice)


def _bases(settings: NodeSettings) -> Iterator[Finding]:
    """Whether the bases for adapters are those that the list beside them names."""
    bases = settings.bases
    if bases is None:
        return
    if not bases.exists():
        advice = "put the base there, if experiments are to train adapters"
        yield Finding(
            "bases are missing", str(bases), "no such file", advice, fault=False
        )
        return
    advice = f"copy the base again from whoever made it; {SUMS} has its sha256"
    try:
        for file, wanted in named_in(bases):
            found = sha256_of(file) if file.is_file() else "no such file"
            if found != wanted:
                yield Finding("base is another one", str(file), found, advice)
        for file in files_in(bases):
            require_base(file)
    except ConfigError as error:
        yield Finding("base is unusable", str(bases), str(error), advice)


def _policy(path: Path) -> Iterator[Finding]:
    try:
        if not load_policy(path).protect.rows.noise:
            what, value = "rows are not hidden", "protect.rows.noise is 0"
            advice = "one message may hold nearly all rows of this node; set a noise"
            yield Finding(what, "policy", value, advice, fault=False)
    except ConfigError as error:
        if isinstance(error.__context__, PermissionError):
            raise error.__context__ from None
        yield Finding("policy is unusable", "policy", str(error), "correct the file")


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
    least = policy.accept.min_rows
    if rows < least:
        value, advice = f"{rows}, accept.min_rows is {least}", "add rows"
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


def _outside(address: Address, ca: Path) -> Iterator[Finding]:
    if not isinstance(x509_at(ca), Finding):
        yield from public_findings(address, ca)


def _link(settings: ServerSettings) -> Iterator[Finding]:
    if not isinstance(x509_at(settings.ca), Finding):
        yield from link_service(settings)


def _environment(unit: Path, variables: Mapping[str, str]) -> Iterator[Finding]:
    """What the unit sets for Flower, or, where there is none, who starts it."""
    where = "environment"
    if unit.exists():
        where = str(unit)
        text = unit.read_text(encoding="utf-8", errors="replace")
        lines = [line.partition("Environment=")[2] for line in text.splitlines()]
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
    missing = [f"{k}={v}" for k, v in SILENCE.items() if variables.get(k) != v]
    if missing:
        advice = "set them, or Flower calls out to the network"
        yield Finding("variables are missing", where, " ".join(missing), advice)


def _flower() -> Iterator[Finding]:
    advice = "pip install 'fedblend[federation]'"
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        yield Finding("Flower is missing", "flwr", "not installed", advice)
        return
    major, minor = (int(part) for part in version.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        yield Finding("Flower's version was not tried", "flwr", version, advice)
