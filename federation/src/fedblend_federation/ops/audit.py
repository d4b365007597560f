# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The audit: a log of what was done, whose lines cannot be changed unseen.

A line of the file is JSON with the time, an event, its fields, the hash of the line
before and its own. Editing, removing or swapping lines breaks the chain. Cutting lines
off at the end does not. So every message carries the newest hash, the ``head``, to the
other side, which writes it into its own audit: the server notes each client's under
``audits``, a node the server's under ``server``. ``verify`` with the other side's file
finds lines that are gone.

A line that a crash cut off is removed, and the next line says so.
"""

import datetime
import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.errors import RunError
from fedblend.simulation.serialize import DAMAGE

BEGINNING = "0" * 64
"""The hash before the first line."""
LONGEST = 4096
"""Bytes of a line: facts fit, rows and gradients do not."""


class AuditError(RunError):
    """An audit file that is not what was written."""


class Verified(NamedTuple):
    """A chain that is whole."""

    lines: int
    head: str


class Audit:
    """A file to which events are added; several processes may, one at a time."""

    def __init__(self, path: Path):
        self._path = path

    def append(self, event: str, **fields: str | int | float | bool | None) -> str:
        """Add an event, on disk when this returns; returns the new head.

        Raises:
            AuditError: the file cannot be continued, or the line is too long.
        """
        with self._lock_file() as file:
            head, torn = _end(file, self._path)
            first = b""
            if torn:
                digest = hashlib.sha256(torn).hexdigest()
                about = {"bytes": len(torn), "sha256": digest}
                head, first = _line("torn line", about, head)
            head, line = _line(event, fields, head)
            file.truncate(file.seek(0, os.SEEK_END) - len(torn))
            if file.write(first + line) != len(first + line):
                raise AuditError(f"{self._path}: no room for another line")
            os.fsync(file.fileno())
        return head

    def note(self, event: str, **fields: Any) -> str:
        """As ``append``; fields that are not numbers become short texts."""
        short = {
            name: value if isinstance(value, int | float) else str(value)[:400]
            for name, value in fields.items()
        }
        return self.append(event, **short)

    @contextmanager
    def _lock_file(self) -> Iterator[FileIO]:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        with FileIO(os.open(self._path, flags, 0o600), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def heads_told(path: Path, client: int | None) -> set[str]:
    """The hashes of the other side's audit that the audit in a file has noted.

    Args:
        path: the audit of a server, or of a node.
        client: whose hashes a server was told; None for those that a node was told.

    Raises:
        AuditError: there is no such file, or a line is not as written.
    """
    found = set()
    for entry in entries(path):
        if entry is None:
            raise AuditError(f"{path}: has lines that were changed")
        told = entry["fields"].get("server")
        if client is not None:
            told = entry["event"] == "audits" and entry["fields"].get(str(client))
        if isinstance(told, str) and len(told) == len(BEGINNING):
            found.add(told)
    return found


def verify(path: Path, heads: Collection[str] = ()) -> Verified:
    """Check the whole chain.

    Args:
        path: the file.
        heads: hashes that were once the newest, as the other side received them.

    Raises:
        AuditError: which line is not what was written, or that lines are missing at the
        end.
    """
    previous, missing, number = BEGINNING, set(heads) - {BEGINNING}, 0
    for number, text in enumerate(_lines(path), start=1):
        if not text.endswith(b"\n"):
            raise AuditError(f"{path}: line {number}: is cut off")
        entry = _parse(text)
        if entry is None:
            raise AuditError(f"{path}: line {number}: was changed")
        if entry["previous"] != previous:
            raise AuditError(
                f"{path}: line {number}: does not follow the line before; lines were "
                "changed, removed or swapped"
            )
        previous = entry["hash"]
        missing.discard(previous)
    if missing:
        raise AuditError(
            f"{path}: no line has hash {min(missing)}, which was once the newest; "
            f"lines were cut off ({len(missing)} of {len(set(heads))} hashes are gone)"
        )
    return Verified(number, previous)


def entries(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of an audit, the oldest first; None for one that is not as written.

    Raises:
        AuditError: there is no such file.
    """
    return map(_parse, _lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one at a time in memory."""
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise AuditError(f"{path}: {error.strerror}") from None


def entries_since(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Whole lines of a file from a byte on, and the byte after them.

    A file that is not there yet has none; one that is shorter is a new one.
    """
    if not path.exists():
        return [], offset
    with open(path, "rb") as file:
        file.seek(offset if offset <= os.fstat(file.fileno()).st_size else 0)
        *lines, torn = file.read().split(b"\n")
        found = [entry for entry in map(_parse, lines) if entry is not None]
        return found, file.tell() - len(torn)


def _line(event: str, fields: dict[str, Any], previous: str) -> tuple[str, bytes]:
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "event": event,
        "fields": fields,
        "previous": previous,
    }
    digest = hash_json(entry)
    line = json.dumps({**entry, "hash": digest}, allow_nan=False).encode() + b"\n"
    if len(line) > LONGEST:
        raise AuditError(
            f"audit: the line of event {event} has {len(line)} bytes; at most "
            f"{LONGEST} are allowed"
        )
    return digest, line


def hash_json(content: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse(text: bytes) -> dict[str, Any] | None:
    """A line that is whole: one with its own right hash."""
    try:
        entry = json.loads(text)
        found = entry.pop("hash")
        whole = set(entry) == {"time", "event", "fields", "previous"}
        return {**entry, "hash": found} if whole and hash_json(entry) == found else None
    except DAMAGE:
        return None


def _end(file: FileIO, path: Path) -> tuple[str, bytes]:
    """The hash of the last whole line, and what stands after it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 2 * LONGEST))
    *lines, torn = file.readall().split(b"\n")
    if len(torn) > LONGEST:
        raise AuditError(f"{path}: its last line is longer than any event")
    if not lines:
        return BEGINNING, torn
    last = _parse(lines[-1])
    if last is None:
        raise AuditError(f"{path}: its last line was changed; nothing is added to it")
    return last["hash"], torn
