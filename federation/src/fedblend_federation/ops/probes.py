# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of keys and certificates on disk, and of a server's public address.

Keys and certificates must exist, be valid, fit each other and be readable by nobody
else. The address is called as an unknown caller would.
"""

import datetime
import http.client
import ipaddress
import os
import pwd
import socket
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedblend_federation.flower.processes import MAX_AHEAD, MAX_BEHIND, clock_remark
from fedblend_federation.ops.settings import Address, ServerSettings

SOON = datetime.timedelta(days=30)
"""How long before its end a certificate is worth a warning."""
RENEW = "fedblend federation renew makes a new one"
CLOSED = (403, 404)
"""The status codes of a proxy that forwards nothing."""
_SECONDS = 5.0
_ROUTES = (
    ("POST", "/v1/control/list-runs"),
    ("GET", "/v1/control/start-run"),
    ("GET", "/v1/runtime/acquire-task"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
)
"""Requests that must not get through; none changes anything where it is answered."""


class Finding(NamedTuple):
    """What is wrong or soon will be, where, its value, and what to do."""

    what: str
    where: str
    value: str
    advice: str
    fault: bool = True
    """Whether the federation must not run like this; otherwise it is a warning."""

    def __str__(self) -> str:
        kind = "fault" if self.fault else "warning"
        return f"{kind}: {self.where}: {self.what}: {self.value}; {self.advice}"


def attempted(found: Iterable[Finding]) -> Iterator[Finding]:
    """Findings, and what this user may not look at."""
    try:
        yield from found
    except PermissionError as error:
        path = Path(str(error.filename or "a file"))
        value = f"user {_user_name(os.geteuid())} may not"
        advice = f"run the doctor as {owner(path)} or root"
        yield Finding("could not be looked at", str(path), value, advice, fault=False)


def owner(path: Path) -> str:
    """The user whose file this is, or else whose folder it is in."""
    for place in (path, *path.parents):
        try:
            return _user_name(place.stat().st_uid)
        except OSError:
            continue
    return "its owner"


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def ending(where: str, end: datetime.datetime, advice: str) -> Iterator[Finding]:
    """A certificate that has ended, or will soon."""
    now = datetime.datetime.now(datetime.UTC)
    value = f"{end:%Y-%m-%d}"
    if end <= now:
        yield Finding("certificate has expired", where, value, advice)
    elif end - now < SOON:
        yield Finding("certificate expires soon", where, value, advice, fault=False)


def public_findings(address: Address, ca: Path) -> Iterator[Finding]:
    """Whether TLS is in order at an address, and what else can be reached there."""
    where = str(address)
    try:
        context = ssl.create_default_context(cafile=str(ca))
        end = _handshake(address, context)
    except ssl.SSLCertVerificationError as error:
        advice = f"check the clock, the host and ca in the settings; {RENEW}"
        yield Finding(
            "certificate is not accepted", where, error.verify_message, advice
        )
        return
    except ssl.SSLError as error:
        yield _without_tls(address, error)
        return
    except OSError as error:
        value = str(error.strerror or error)
        advice = "what it would answer is not known; start the server and try again"
        yield Finding("cannot be reached", where, value, advice, fault=False)
        return
    yield from ending(where, end, RENEW)
    remark = None
    for method, path in _ROUTES:
        status, date = _answer(address, context, method, path)
        remark = remark or clock_remark(date)
        if status is not None and status not in CLOSED:
            yield Finding(
                "is open to everyone",
                f"https://{address}{path}",
                f"{method} answers {status}",
                "let the proxy forward /v1/fleet/ only, as server/nginx.conf does",
            )
    if remark is not None:
        advice = (
            "set both clocks, as timedatectl set-ntp true does; the link refuses a "
            f"node more than {MAX_BEHIND:g} s behind or {MAX_AHEAD:g} s ahead"
        )
        yield Finding("clocks differ", where, remark, advice)


def link_findings(address: Address, link: Address) -> Iterator[Finding]:
    """Whether the link also listens where the public comes in."""
    if address.port == link.port:
        return
    try:
        found = socket.getaddrinfo(address.host, link.port, type=socket.SOCK_STREAM)
    except OSError:
        return
    own = {link.host, "127.0.0.1", "::1"}
    for host in sorted({str(entry[4][0]) for entry in found} - own):
        try:
            socket.create_connection((host, link.port), _SECONDS).close()
        except OSError:
            continue
        yield Finding(
            "the link can be reached from outside",
            str(Address(host, link.port)),
            "it accepts connections",
            "start it with --host 127.0.0.1 and close the port in the firewall",
        )


def _handshake(address: Address, context: ssl.SSLContext) -> datetime.datetime:
    """The end of the certificate that is shown there."""
    with (
        socket.create_connection(address, _SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as secured,
    ):
        shown = secured.getpeercert() or {}
        seconds = ssl.cert_time_to_seconds(str(shown["notAfter"]))
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _without_tls(address: Address, error: ssl.SSLError) -> Finding:
    connection = http.client.HTTPConnection(*address, timeout=_SECONDS)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        value = error.reason or str(error)
        return Finding("does not speak TLS", str(address), value, "start the proxy")
    finally:
        connection.close()
    return Finding(
        "speaks plain HTTP",
        f"http://{address}/health",
        f"GET answers {status}",
        "put the proxy of server/nginx.conf before it; everything can be read and "
        "changed on its way",
    )


def _answer(
    address: Address, context: ssl.SSLContext, method: str, path: str
) -> tuple[int | None, str | None]:
    """The status of a response, and its date; None if there is none."""
    connection = http.client.HTTPSConnection(
        *address, timeout=_SECONDS, context=context
    )
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.getheader("date")
    except (OSError, http.client.HTTPException):
        return None, None
    finally:
        connection.close()


COPY = "copy it from the folder that fedblend federation init made"
MAKE = "fedblend federation keys node.toml"
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)


def secret(path: Path, advice: str) -> Iterator[Finding]:
    """Whether a secret key is there, and nobody else's to read."""
    if not path.exists():
        yield Finding("key is missing", str(path), "no such file", advice)
    yield from permissions("key", path, 0o600)


def permissions(
    what: str, path: Path, mode: int, wrong: int = 0o077
) -> Iterator[Finding]:
    """Whether others have rights that they must not have."""
    if path.exists() and path.stat().st_mode & wrong:
        found = f"mode {path.stat().st_mode & 0o777:o}"
        advice = f"chmod {mode:o} {path}"
        yield Finding(f"{what} is open to others", str(path), found, advice)


def authority(path: Path) -> Iterator[Finding]:
    """Whether the certificate of the authority can be used."""
    shown = x509_at(path)
    if isinstance(shown, Finding):
        yield shown
    else:
        advice = "begin a new federation with fedblend federation init"
        yield from ending(str(path), shown.not_valid_after_utc, advice)


def certificate(settings: ServerSettings) -> Iterator[Finding]:
    """Whether the server's certificate is valid, for its address and its key."""
    shown, above = x509_at(settings.certificate), x509_at(settings.ca)
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


def x509_at(path: Path) -> x509.Certificate | Finding:
    """The certificate in a file, or why there is none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except PermissionError:
        raise
    except OSError as error:
        value = error.strerror or str(error)
    except ValueError:
        value = "not a certificate in PEM format"
    return Finding("certificate cannot be read", str(path), value, COPY)


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


def public_key(path: Path) -> Iterator[Finding]:
    """Whether a node's public key can be used."""
    advice = "fedblend federation roster puts it there, from public.toml of the node"
    try:
        key = load_ssh_public_key(path.read_bytes())
    except PermissionError:
        raise
    except OSError as error:
        value = error.strerror or str(error)
        yield Finding("public key cannot be read", str(path), value, advice)
    except _UNREADABLE:
        yield Finding("public key cannot be read", str(path), "not OpenSSH's", advice)
    else:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            yield Finding("is no ECDSA key", str(path), type(key).__name__, advice)


def own_key(path: Path) -> Iterator[Finding]:
    """Whether a node's own key can be used."""
    if not path.exists():
        return
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except _UNREADABLE:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        advice = f"remove it; {MAKE} makes another one"
        yield Finding("is no ECDSA key of OpenSSH", str(path), "unusable", advice)
