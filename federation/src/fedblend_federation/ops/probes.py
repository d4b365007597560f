# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of keys and certificates on disk, and of a server's public address.

Keys and certificates must exist, be valid, fit each other and be readable by nobody
else. The address is called as an unknown caller would.
"""

import datetime
import http.client
import os
import pwd
import socket
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from fedblend.errors import InputError
from fedblend_federation.flower.processes import MAX_AHEAD, MAX_BEHIND, clock_remark
from fedblend_federation.ops import key_files
from fedblend_federation.ops.settings import Address, ServerSettings

Found = TypeVar("Found")
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


def catch_unreadable(found: Iterable[Finding]) -> Iterator[Finding]:
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


def usable(
    what: str, path: Path, read: Callable[[Path], Found], advice: str
) -> Generator[Finding, None, Found | None]:
    """What the programs read from a file; a fault and None where they would fail."""
    try:
        return read(path)
    except InputError as error:
        if isinstance(error.__context__, PermissionError):
            raise error.__context__ from None
        value = str(error).removeprefix(f"{path}: ")
        yield Finding(f"{what} cannot be used", str(path), value, advice)
        return None


def ending(where: str, end: datetime.datetime, advice: str) -> Iterator[Finding]:
    """A certificate that has ended, or will soon."""
    left, value = end - datetime.datetime.now(datetime.UTC), f"{end:%Y-%m-%d}"
    if left < SOON:
        over = left <= datetime.timedelta()
        what = "certificate has expired" if over else "certificate expires soon"
        yield Finding(what, where, value, advice, fault=over)


def public_findings(address: Address, ca: Path) -> Iterator[Finding]:
    """Whether TLS is in order at an address, and what else can be reached there."""
    where, context = str(address), trusting(ca)
    if context is None:
        return
    try:
        end = _handshake(address, context)
    except ssl.SSLCertVerificationError as error:
        yield _not_accepted(where, error)
        return
    except ssl.SSLError as error:
        yield _find_plain_http(address, error)
        return
    except OSError as error:
        value = str(error.strerror or error)
        advice = "what it would answer is not known; start the server and try again"
        yield Finding("cannot be reached", where, value, advice, fault=False)
        return
    yield from ending(where, end, RENEW)
    remark = None
    for method, path in _ROUTES:
        secured = http.client.HTTPSConnection(
            *address, timeout=_SECONDS, context=context
        )
        status, date = _answer(secured, method, path)
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


def _find_plain_http(address: Address, error: ssl.SSLError) -> Finding:
    plain = http.client.HTTPConnection(*address, timeout=_SECONDS)
    status, _ = _answer(plain, "GET", "/health")
    if status is None:
        value = error.reason or str(error)
        return Finding("does not speak TLS", str(address), value, "start the proxy")
    return Finding(
        "speaks plain HTTP",
        f"http://{address}/health",
        f"GET answers {status}",
        "put the proxy of server/nginx.conf before it; everything can be read and "
        "changed on its way",
    )


def _answer(
    connection: http.client.HTTPConnection, method: str, path: str
) -> tuple[int | None, str | None]:
    """The status of a response, and its date; None if there is none."""
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
    shown = yield from usable("certificate", path, key_files.certificate, COPY)
    if shown is not None:
        advice = "begin a new federation with fedblend federation init"
        yield from ending(str(path), shown.not_valid_after_utc, advice)


def certificate(settings: ServerSettings) -> Iterator[Finding]:
    """Whether a node will accept the server's certificate, in a handshake in memory."""
    client, where = trusting(settings.ca), settings.certificate
    shown = yield from usable("certificate", where, key_files.certificate, COPY)
    if client is None or shown is None or not settings.key.exists():
        return
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here, there, host = ssl.MemoryBIO(), ssl.MemoryBIO(), settings.address.host
    try:
        # An empty password: a key that has one must not ask for it.
        server.load_cert_chain(where, settings.key, password="")
        node = client.wrap_bio(here, there, server_hostname=host)
        link = server.wrap_bio(there, here, server_side=True)
        for end in (node, link, node):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        yield _not_accepted(str(where), error)
    else:
        yield from ending(str(where), shown.not_valid_after_utc, RENEW)


def _not_accepted(where: str, error: ssl.SSLError) -> Finding:
    value = getattr(error, "verify_message", error.reason) or str(error)
    advice = f"check the clock, the host and ca in the settings; {RENEW}"
    return Finding("certificate is not accepted", where, value, advice)


def trusting(ca: Path) -> ssl.SSLContext | None:
    """How nodes connect; None if the authority's certificate cannot be used."""
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (ssl.SSLError, FileNotFoundError):
        return None  # the check of that certificate says so
