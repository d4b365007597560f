# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node that stays warm: messages over a unix socket, to one long-lived process.

Flower starts a process for every message; importing JAX and compiling there would take
longer than most rounds. The process behind the socket has the rows loaded and the
functions compiled. Nothing here imports JAX: the process in front must start quickly.

Who may write to the socket is decided by its permissions and those of its folder, and,
where that is one user alone, checked again by the user id of whoever connects.
"""

import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_HEAD = struct.Struct("!Q")
_PEER = struct.Struct("3i")
CONNECT_WITHIN = 5.0
"""Seconds."""


class SocketError(OSError):
    """The process behind a socket cannot be asked, and why."""


def ask(path: Path, message: bytes, within: float | None = None) -> bytes:
    """The answer of the process behind a socket.

    Args:
        path: the socket.
        message: what to send.
        within: seconds to wait for the answer, as long as it takes if None.

    Raises:
        SocketError: nobody is there, or it is not the owner's socket.
    """
    try:
        owner = os.stat(path)
        if not stat.S_ISSOCK(owner.st_mode) or owner.st_mode & stat.S_IWOTH:
            raise SocketError(f"{path}: is not a socket that only its owner writes to")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(CONNECT_WITHIN)
            with _short(path) as name:
                line.connect(name)
            line.settimeout(within)
            line.sendall(_HEAD.pack(len(message)))
            line.sendall(message)
            return _received(line, None)
    except (OSError, ConnectionError) as error:
        raise SocketError(f"{path}: {error.strerror or error}") from None


def serve(
    path: Path,
    answer: Callable[[bytes], bytes],
    *,
    longest: Callable[[], int | None],
    group: int | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Answer messages, one after the other, until the process is told to stop.

    Args:
        path: where the socket goes; one that is left over is replaced.
        answer: a message's answer.
        longest: () -> bytes of a message that are read at all.
        group: whose members may write to it, too, and read its folder.
        ready: called when messages can come.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileNotFoundError):
        path.unlink()
    before = os.umask(0o177)
    try:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(path) as name:
            listening.bind(name)
    finally:
        os.umask(before)
    if group is not None:
        for place, mode in ((path.parent, 0o750), (path, 0o660)):
            os.chown(place, -1, group)
            os.chmod(place, mode)
    listening.listen(8)
    ready()
    with listening:
        while True:
            line, _ = listening.accept()
            with line, suppress(ConnectionError, TimeoutError):
                if group is None and _user(line) not in (os.getuid(), 0):
                    continue
                line.settimeout(60.0)
                message = _received(line, longest())
                reply = answer(message)
                line.sendall(_HEAD.pack(len(reply)))
                line.sendall(reply)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name of a path: that of a socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _user(line: socket.socket) -> int:
    """The user id of whoever connected, as the kernel knows it."""
    peer = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(peer)[1]


def _received(line: socket.socket, longest: int | None) -> bytes:
    (size,) = _HEAD.unpack(_exactly(line, _HEAD.size))
    if longest is not None and size > longest:
        raise ConnectionError(f"{size} bytes, at most {longest} are taken")
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    """So many bytes; memory grows with what really comes."""
    data = bytearray()
    while len(data) < size:
        piece = line.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the other side closed the line")
        data += piece
    return bytes(data)
