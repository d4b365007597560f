# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding and downloading the files of public datasets.

The names, addresses and checksums of the files are data, in ``catalog.toml``.

A download goes to a ``.part`` file, resumes where it broke off, is checked, and only
then gets its name: a file under its name is complete.
"""

import bz2
import gzip
import hashlib
import lzma
import os
import ssl
import tomllib
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import IO, NamedTuple, cast

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.errors import hint

Progress = Callable[[int, int | None], None]
"""``progress(done, total)`` in bytes of the current file; total may be unknown."""

_CHUNK = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte
_BROKEN = (TimeoutError, ConnectionError, ssl.SSLError, HTTPException, ValueError)


class PublicFile(NamedTuple):
    """A file of a public dataset."""

    name: str
    """In the folder, and at the end of its addresses."""
    checksum: str
    """In hexadecimal; 64 digits are sha256, 32 are md5."""
    size: int | None = None
    """In bytes, where it is known."""
    addresses: Sequence[str] = ()
    """URLs, in the order of trying."""
    also: Sequence[str] = ()
    """Other names of the same file."""
    unpacked: bool = False
    """Whether the checksum is that of the content of a ``.bz2`` or ``.gz`` file."""


class PublicSet(NamedTuple):
    """The files of a public dataset."""

    folder: str
    """Below the data home."""
    files: tuple[PublicFile, ...]
    """All files that the dataset needs."""
    copies: tuple[PublicFile, ...] = ()
    """A reduced form, which is read where ``files`` are missing."""
    instruction: str = ""
    """How to obtain the files where ``get`` cannot download them, in one line."""
    installed: str = ""
    """Where a package of the operating system puts the files, if there is one."""


@cache
def public_sets() -> dict[str, PublicSet]:
    """The datasets with files, by the name that ``fedblend data get`` takes."""
    text = Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    for entry in entries.values():
        for kind in {"files", "copies"} & entry.keys():
            entry[kind] = tuple(PublicFile(**file) for file in entry[kind])
    return {name: PublicSet(**entry) for name, entry in entries.items()}


class FileStatus(NamedTuple):
    """One file of a dataset on this machine."""

    file: PublicFile
    path: Path | None
    """Its path, or None where it is missing."""
    intact: bool | None
    """Whether its checksum is right; None where that was not checked."""


class Status(NamedTuple):
    """A public dataset on this machine."""

    name: str
    folder: Path
    files: tuple[FileStatus, ...]
    copies: tuple[FileStatus, ...]
    instruction: str

    @property
    def complete(self) -> bool:
        """Whether all files exist."""
        return all(entry.path for entry in self.files)

    @property
    def usable(self) -> bool:
        """Whether a loader can read all files, or the reduced form."""
        reduced = bool(self.copies) and all(entry.path for entry in self.copies)
        return self.complete or reduced


def data_home() -> Path:
    """The folder of all datasets: $FEDBLEND_DATA, or one in the user's cache."""
    chosen = os.environ.get("FEDBLEND_DATA")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedblend" / "data"


def public_set(name: str) -> PublicSet:
    """The public dataset of this name."""
    known = public_sets()
    if name not in known:
        raise DataError(
            f"{name!r} is not a public dataset with files; {hint(name, known)}"
        )
    return known[name]


def find(name: str, *files: str) -> Path:
    """The path of the first of these files that exists, under any of its names."""
    dataset = public_set(name)
    folder = data_home() / dataset.folder
    others = {file.name: file.also for file in (*dataset.files, *dataset.copies)}
    places = [folder, *([Path(dataset.installed)] if dataset.installed else [])]
    for file in files:
        for place in places:
            for candidate in (file, *others.get(file, ())):
                if (place / candidate).is_file():
                    return place / candidate
    advice = dataset.instruction or f"get it with: fedblend data get {name}"
    raise MissingDataError(f"{name}: {files[0]} is not in {folder}; {advice}")


def find_either(name: str, chosen: str | None, *files: str) -> Path:
    """The path of the user's own file, or of a public file of a dataset.

    Args:
        name: of the dataset.
        chosen: the path of the user's file, if there is one.
        files: otherwise the first of these files that exists.
    """
    if chosen is None:
        return find(name, *files)
    path = Path(chosen)
    if not path.is_file():
        raise MissingDataError(f"{name}: {path}: no such file")
    return path


def open_unpacked(path: Path) -> IO[bytes]:
    """A file for reading: the content of a .xz or .bz2 file, or the file itself."""
    opened = {".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix)
    return path.open("rb") if opened is None else cast(IO[bytes], opened(path))


def status(name: str, *, verify: bool = False) -> Status:
    """Which files of a dataset exist; with ``verify`` also whether they are intact."""
    dataset = public_set(name)

    def look(file: PublicFile) -> FileStatus:
        try:
            path = find(name, file.name)
        except MissingDataError:
            return FileStatus(file, None, None)
        return FileStatus(file, path, _intact(file, path) if verify else None)

    return Status(
        name,
        data_home() / dataset.folder,
        tuple(look(file) for file in dataset.files),
        tuple(look(file) for file in dataset.copies),
        dataset.instruction,
    )


def get(
    name: str,
    *,
    progress: Progress = lambda done, total: None,
    base: str | None = None,
) -> list[Path]:
    """Download the missing files of a dataset, and check all files.

    Args:
        name: of the dataset; see ``public_sets``.
        progress: called with the bytes done and in all, file by file.
        base: the address of a mirror that has the files.

    Returns:
        The paths of the files.
    """
    dataset = public_set(name)
    if dataset.instruction:
        raise DataError(f"{name}: cannot be downloaded: {dataset.instruction}")
    found = status(name)
    paths = []
    for file, path, _ in found.files:
        if path is None or not _intact(file, path):
            path = found.folder / file.name
            addresses = (f"{base.rstrip('/')}/{file.name}",) if base else file.addresses
            try:
                found.folder.mkdir(parents=True, exist_ok=True)
                _fetch(name, file, addresses, path, progress)
            except OSError as error:
                raise DataError(
                    f"{name}: cannot write {path}: {error.strerror or error}"
                ) from None
        paths.append(path)
    return paths


def _fetch(
    name: str,
    file: PublicFile,
    addresses: Sequence[str],
    path: Path,
    progress: Progress,
) -> None:
    """Download one file from the first address that has it."""
    part = path.with_name(path.name + ".part")
    problems = []
    for address in addresses:
        problem = _stream(address, part, file, progress)
        if problem is None and _intact(file, part):
            part.replace(path)
            return
        if problem is None:
            part.unlink()
            problem = f"the checksum is wrong, deleted (wanted {file.checksum[:12]}...)"
        problems.append(f"{address}: {problem}")
    raise DataError(
        f"{name}: {file.name} could not be downloaded: {'; '.join(problems)}"
    )


def _stream(
    address: str, part: Path, file: PublicFile, progress: Progress
) -> str | None:
    """Append the missing bytes to a ``.part`` file; returns the problem, if any."""
    done = part.stat().st_size if part.exists() else 0
    if file.size is not None and done >= file.size:
        return None
    headers = {"User-Agent": "fedblend", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            if response.status != 206:  # the server sends the whole file
                done = 0
            length = response.headers.get("Content-Length")
            total = done + int(length) if length else file.size
            with part.open("ab" if done else "wb") as sink:
                progress(done, total)
                while chunk := response.read(_CHUNK):
                    sink.write(chunk)
                    done += len(chunk)
                    progress(done, total)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the file has no more bytes: the checksum decides
            return None
        return f"HTTP {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return _one_line(error.reason)
    except _BROKEN as error:
        return _one_line(error)
    if total is not None and done < total:
        return f"broke off after {done} of {total} bytes; run again to continue"
    return None


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _intact(file: PublicFile, path: Path) -> bool:
    """Whether the checksum of a file is right."""
    algorithm = "sha256" if len(file.checksum) == 64 else "md5"
    digest = hashlib.new(algorithm, usedforsecurity=False)
    suffix = Path(path.name.removesuffix(".part")).suffix
    opened = {".bz2": bz2.open, ".gz": gzip.open}.get(suffix) if file.unpacked else None
    try:
        with path.open("rb") if opened is None else opened(path) as source:
            while chunk := cast(IO[bytes], source).read(_CHUNK):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error):
        return False
    return digest.hexdigest() == file.checksum
