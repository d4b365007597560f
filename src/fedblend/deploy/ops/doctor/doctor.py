# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Is a machine fit to take part? Findings have a place, a value and advice."""

import ipaddress
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedblend.deploy.client.policy import load_policy
from fedblend.deploy.ops.doctor.probes import (
    RENEW,
    Finding,
    ending,
    link_findings,
    public_findings,
)
from fedblend.deploy.ops.flwr_processes import SILENCE
from fedblend.deploy.ops.guard import is_open
from fedblend.deploy.ops.settings import (
    Address,
    NodeSettings,
    ServerSettings,
    is_loopback,
    load,
)
from fedblend.errors import ConfigError, RunError

OLDEST, TOO_NEW = (1, 41), (1, 43)
"""Versions of Flower that fedblend was tried with: from, and below."""
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)


def examine(path: Path, variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look at settings, and at what they name, on disk and on the network.

    Args:
        path: ``server.toml``, ``node.toml``, or a folder that has some.
        variables: the environment in which Flower would be started.

    Raises:
        ConfigError: settings that cannot be read.
    """
    found = []
    for file in _settings_in(path):
        settings = load(file)
        server = isinstance(settings, ServerSettings)
        found += _server(settings) if server else _node(settings)
        unit = file.parent / f"fedblend-{'link' if server else 'node'}.service"
        found += _environment(unit, variables)
    return [*_flower(), *found]


def _settings_in(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    names = ("server.toml", "node.toml", "server/server.toml", "nodes/*/node.toml")
    files = [file for name in names for file in sorted(path.glob(name))]
    if not files:
        raise RunError(f"{path}: has neither server.toml nor node.toml")
    return files


def _server(settings: ServerSettings) -> Iterator[Finding]:
    if not is_loopback(settings.link.host):
        yield Finding(
            "the link is not on loopback",
            "link",
            str(settings.link),
            "it serves everyone who reaches it; write 127.0.0.1:8000",
        )
    yield from _secret(settings.key)
    yield from _permissions("state folder", settings.folder, 0o700)
    yield from _authority(settings.ca)
    yield from _certificate(settings)
    for node in settings.nodes:
        yield from _public_key(node.key)
    yield from _outside(settings.address, settings.ca)
    yield from link_findings(settings.address, settings.link)
    yield from _guard(settings)


def _guard(settings: ServerSettings) -> Iterator[Finding]:
    """Whether the link serves every user of this machine."""
    if is_loopback(settings.link.host) and is_open(settings.link, settings.ca):
        yield Finding(
            "is open to every user of this machine",
            f"https://{settings.link}/v1/control/",
            "calls that start runs are answered",
            "start the link with fedblend federation server",
        )


def _node(settings: NodeSettings) -> Iterator[Finding]:
    yield from _secret(settings.key)
    yield from _permissions("state folder", settings.folder, 0o700)
    yield from _permissions("state folder", settings.flower_folder, 0o700)
    yield from _separation(settings)
    yield from _authority(settings.ca)
    yield from _own_key(settings.key)
    try:
        load_policy(settings.policy)
    except ConfigError as error:
        yield Finding("policy is unusable", "policy", str(error), "correct the file")
    if not settings.data.file.exists():
        where = str(settings.data.file)
        advice = "put the node's rows there, or name them in [data]"
        yield Finding("rows are missing", where, "no such file", advice, fault=False)
    yield from _outside(settings.server, settings.ca)


def _separation(settings: NodeSettings) -> Iterator[Finding]:
    """Whether code that the server sends could read the rows."""
    places = (settings.folder, settings.flower_folder)
    # Who can write there could stand in for the worker.
    socket = settings.worker_socket.parent
    yield from _permissions("folder of the socket", socket, 0o750, wrong=0o022)
    yield from _permissions("file of rows", settings.data.file, 0o600)
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
    if not isinstance(_x509(ca), Finding):
        yield from public_findings(address, ca)


def _secret(path: Path) -> Iterator[Finding]:
    if not path.exists():
        advice = "copy it from the folder that fedblend federation init made"
        yield Finding("key is missing", str(path), "no such file", advice)
    yield from _permissions("key", path, 0o600)


def _permissions(
    what: str, path: Path, mode: int, wrong: int = 0o077
) -> Iterator[Finding]:
    """Whether others have rights that they must not have."""
    if path.exists() and path.stat().st_mode & wrong:
        found = f"mode {path.stat().st_mode & 0o777:o}"
        advice = f"chmod {mode:o} {path}"
        yield Finding(f"{what} is open to others", str(path), found, advice)


def _authority(path: Path) -> Iterator[Finding]:
    shown = _x509(path)
    if isinstance(shown, Finding):
        yield shown
    else:
        advice = "begin a new federation with fedblend federation init"
        yield from ending(str(path), shown.not_valid_after_utc, advice)


def _certificate(settings: ServerSettings) -> Iterator[Finding]:
    shown, above = _x509(settings.certificate), _x509(settings.ca)
    if isinstance(shown, Finding):
        yield shown
        return
    where, host = str(settings.certificate), settings.address.host
    yield from ending(where, shown.not_valid_after_utc, RENEW)
    if not _covers(shown, host):
        value = f"not for {host}"
        yield Finding("certificate does not match address", where, value, RENEW)
    if not isinstance(above, Finding) and not _signed_by(shown, above):
        value = f"not by {settings.ca}"
        yield Finding("certificate is signed by another authority", where, value, RENEW)
    if settings.key.exists() and not _belongs(settings.key, shown):
        value = f"not of {settings.key}"
        yield Finding("certificate is of another key", where, value, RENEW)


def _x509(path: Path) -> x509.Certificate | Finding:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        value = error.strerror or str(error)
    except ValueError:
        value = "not a certificate in PEM format"
    advice = "copy it from the folder that fedblend federation init made"
    return Finding("certificate cannot be read", str(path), value, advice)


def _covers(shown: x509.Certificate, host: str) -> bool:
    try:
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return False
    try:
        wanted = ipaddress.ip_address(host)
        return wanted in names.value.get_values_for_type(x509.IPAddress)
    except ValueError:
        known = names.value.get_values_for_type(x509.DNSName)
        return host.lower() in map(str.lower, known)


def _signed_by(shown: x509.Certificate, above: x509.Certificate) -> bool:
    try:
        shown.verify_directly_issued_by(above)
    except (InvalidSignature, *_UNREADABLE):
        return False
    return True


def _belongs(key: Path, shown: x509.Certificate) -> bool:
    try:
        own = load_pem_private_key(key.read_bytes(), None).public_key()
    except _UNREADABLE:
        return False
    return own == shown.public_key()


def _public_key(path: Path) -> Iterator[Finding]:
    advice = "put the node's node.pub there"
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        value = error.strerror or str(error)
        yield Finding("public key cannot be read", str(path), value, advice)
    except _UNREADABLE:
        yield Finding("public key cannot be read", str(path), "not OpenSSH's", advice)
    else:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            yield Finding("is no ECDSA key", str(path), type(key).__name__, advice)


def _own_key(path: Path) -> Iterator[Finding]:
    if not path.exists():
        return
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except _UNREADABLE:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        advice = "make one with ssh-keygen -t ecdsa -b 384 -N ''"
        yield Finding("is no ECDSA key of OpenSSH", str(path), "unusable", advice)


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
    advice = "pip install 'fedblend[flower]'"
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        yield Finding("Flower is missing", "flwr", "not installed", advice)
        return
    major, minor = (int(part) for part in version.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        yield Finding("Flower's version was not tried", "flwr", version, advice)
