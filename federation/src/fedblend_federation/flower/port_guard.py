# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A guard in front of the ports that Flower's programs open on loopback.

Flower's link starts runs, which are code, for everyone who reaches its port, and its
SuperNode hands out messages on a port of its own. On loopback every user of the machine
reaches both. The guard lets a call pass if the process at the other end belongs to the
user of the program, or to root; the kernel knows whose the other end of a connection on
this machine is. Calls of nodes, which carry a signature, pass without that, because
they come through the proxy, which is another user.

``python -m fedblend_federation.flower.port_guard flower-superlink ARGUMENTS`` runs a
program of Flower with the guard before every port that it serves.
"""

import ipaddress
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedblend.errors import RunError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""As ASGI defines them."""

FOR_ALL = ("/v1/fleet/", "/health")
"""Calls that pass whoever makes them: Flower checks the signatures of the first."""
WITNESS = "/fedblend-guard"
"""The guard itself answers here, so that the doctor sees whether it is there."""
_ESTABLISHED = "01"
_TABLES = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}


class Guard:
    """An ASGI application that refuses other users of this machine.

    Args:
        application: what the guard stands before.
        owner: from the two ends of a connection, the caller's first, to the user id
            of the caller; None if it is not known.
    """

    def __init__(
        self,
        application: Application,
        owner: Callable[[tuple[str, int], tuple[str, int]], int | None] | None = None,
    ):
        self._application = application
        self._owner = owner or owner_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or answer it with 403."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":
            return None
        if scope["path"] == WITNESS:
            return await _answer(send, 200)
        if scope["path"].startswith(FOR_ALL) or self._is_own(scope):
            return await self._application(scope, receive, send)
        return await _answer(send, 403)

    def _is_own(self, scope: Scope) -> bool:
        caller, here = scope.get("client"), scope.get("server")
        if not caller or not here:
            return False
        return self._owner(tuple(caller), tuple(here)) in (os.getuid(), 0)


async def _answer(send: Send, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def owner_of(caller: tuple[str, int], here: tuple[str, int]) -> int | None:
    """The user id of the process at the caller's end of a connection.

    A socket that its process has closed is listed as root's: only a connection that is
    established and belongs to a process counts.
    """
    try:
        version = ipaddress.ip_address(caller[0]).version
        ends = [_kernel_form(*caller), _kernel_form(*here)]
        lines = _TABLES[version].read_text().splitlines()[1:]
    except (ValueError, OSError):
        return None
    for line in lines:
        _, local, remote, state, _, _, _, user, _, inode, *_ = line.split()
        if [local, remote] == ends:
            known = state == _ESTABLISHED and inode != "0"
            return int(user) if known else None
    return None


def _kernel_form(host: str, port: int) -> str:
    """An address as the kernel lists it: in words of the machine's byte order."""
    packed = ipaddress.ip_address(host).packed
    order = -1 if sys.byteorder == "little" else 1
    words = [packed[at : at + 4][::order] for at in range(0, len(packed), 4)]
    return f"{b''.join(words).hex().upper()}:{port:04X}"


def is_open(address: object, ca: Path) -> bool:
    """Whether a link is up at an address with no guard before it.

    Whoever asks may be a user whom the guard lets pass, so the guard itself is asked.
    """
    health, witness = (status_of(address, ca, path) for path in ("/health", WITNESS))
    return health == 200 and witness != 200


def status_of(address: object, ca: Path, path: str) -> int | None:
    """The status of a call; None if nothing answers."""
    try:
        trusted = ssl.create_default_context(cafile=str(ca))
        url = f"https://{address}{path}"
        with urllib.request.urlopen(url, timeout=5, context=trusted) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def main() -> None:
    """Run a program of Flower with the guard before every port that it serves."""
    import uvicorn

    name = sys.argv[1]
    found = [one for one in entry_points(group="console_scripts") if one.name == name]
    if not found:
        raise RunError(f"{name}: is not installed; pip install 'fedblend[federation]'")
    configure = uvicorn.Config.__init__

    def guard(self: uvicorn.Config, app: Application, **options: Any) -> None:
        # A header must not tell the guard where a call comes from.
        options["proxy_headers"] = False
        configure(self, Guard(app), **options)

    setattr(uvicorn.Config, "__init__", guard)  # noqa: B010
    del sys.argv[0]
    found[0].load()()


if __name__ == "__main__":
    main()
