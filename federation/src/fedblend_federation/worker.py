# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node's worker: one long-lived process that answers messages over a unix socket.

The process that has the network may belong to another user than the rows. It is our
carrier without rows, or Flower's SuperNode, which starts a process for every message.
It hands each message to the worker, which has the rows loaded and the functions
compiled. This module does not import JAX, so that such a process starts quickly.

The permissions of the socket and of its folder decide who may connect. Where that is
one user alone, the worker also checks the user id of the process that connects.
"""

import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_LENGTH = struct.Struct("!Q")
_PEER = struct.Struct("3i")
CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 60.0
"""Seconds."""


class SocketError(OSError):
    """The worker cannot be asked, and why."""


class Handler(NamedTuple):
    """Answers one message."""

    reply: Callable[[bytes], bytes]
    max_bytes: int | None = None
    """A longer message is not read."""


def request(path: Path, message: bytes, timeout: float | None = None) -> bytes:
    """The worker's reply to a message.

    Args:
        path: the worker's socket.
        message: what to send.
        timeout: seconds to wait for the reply; no limit if None.

    Raises:
        SocketError: no worker is there, or others may write to its socket.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISSOCK(found.st_mode) or found.st_mode & stat.S_IWOTH:
            raise OSError("is not a socket that only its owner writes to")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(CONNECT_TIMEOUT)
            with _short(path) as name:
                connection.connect(name)
            connection.settimeout(timeout)
            _send(connection, message)
            return _receive(connection, None)
    except OSError as error:
        raise SocketError(f"{path}: {error.strerror or error}") from None


def serve(
    path: Path,
    handler: Callable[[], Handler],
    *,
    group: int | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Answer messages, one after the other, until the process ends.

    Args:
        path: of the socket; one that is left over is replaced.
        handler: called once for every message, before the message is read.
        group: whose members may write to the socket, too, and read its folder.
        ready: called when messages can come.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileNotFoundError):
        path.unlink()
    before = os.umask(0o177)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(path) as name:
            listener.bind(name)
    finally:
        os.umask(before)
    if group is not None:
        for place, mode in ((path.parent, 0o750), (path, 0o660)):
            os.chown(place, -1, group)
            os.chmod(place, mode)
    listener.listen(8)
    ready()
    with listener:
        while True:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError, TimeoutError):
                if group is None and _user(connection) not in (os.getuid(), 0):
                    continue
                connection.settimeout(READ_TIMEOUT)
                own = handler()
                message = _receive(connection, own.max_bytes)
                # An empty message asks whether the worker is there, and nothing else.
                _send(connection, own.reply(message) if message else b"")


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name of a path: the name of a socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _user(connection: socket.socket) -> int:
    """The user id of the process that connected, as the kernel knows it."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(peer)[1]


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)))
    if message:
        connection.sendall(message)


def _receive(connection: socket.socket, max_bytes: int | None) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if max_bytes is not None and size > max_bytes:
        raise ConnectionError(f"{size} bytes, at most {max_bytes} are accepted")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes; memory grows with what really comes."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        data += piece
    return bytes(data)
