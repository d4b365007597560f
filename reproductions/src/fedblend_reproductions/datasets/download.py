# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding and downloading the files of public datasets.

The names, addresses and checksums of the files are data, in ``catalog.toml``.

A download goes to a ``.part`` file, resumes where it broke off, is checked, and only
then gets its name: a file under its name is complete.
"""

import hashlib
import os
import ssl
import tomllib
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from fedblend.data.dataset import DataError, MissingDataError, open_unpacked

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

    name: str
    """By which ``fedblend data get`` finds it."""
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

    def path(self, file: PublicFile) -> Path | None:
        """The path of a file on this machine, under any of its names."""
        folders = [data_home() / self.folder]
        folders += [Path(self.installed)] if self.installed else []
        names = (file.name, *file.also)
        paths = (folder / name for folder in folders for name in names)
        return next((path for path in paths if path.is_file()), None)

    def describe(self) -> list[str]:
        """Where each file is, and how to get what is missing."""
        lines = [
            f"file {file.name}: {self.path(file) or 'not here'}"
            for file in (*self.files, *self.copies)
        ]
        if self.usable:
            return lines
        advice = self.instruction or f"fedblend data get {self.name}"
        return [*lines, f"to get {self.name}: {advice}"]

    def get(
        self,
        progress: Progress = lambda done, total: None,
        base: str | None = None,
    ) -> list[Path]:
        """Download the missing files, and check all files.

        Args:
            progress: called with the bytes done and in all, file by file.
            base: the address of a mirror that has the files.

        Returns:
            The paths of the files.
        """
        if self.instruction:
            raise DataError(f"{self.name}: cannot be downloaded: {self.instruction}")
        paths = []
        for file in self.files:
            path = self.path(file)
            if path is None or not is_intact(file, path):
                path = data_home() / self.folder / file.name
                addresses = file.addresses
                if base:
                    addresses = (f"{base.rstrip('/')}/{file.name}",)
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _fetch(self.name, file, addresses, path, progress)
                except OSError as error:
                    raise DataError(
                        f"{self.name}: cannot write {path}: {error.strerror or error}"
                    ) from None
            paths.append(path)
        return paths

    @property
    def usable(self) -> bool:
        """Whether a loader can read all files, or the reduced form."""
        forms = [form for form in (self.files, self.copies) if form]
        return any(all(map(self.path, form)) for form in forms)


def _read_catalog() -> dict[str, PublicSet]:
    found = {}
    path = Path(__file__).with_name("catalog.toml")
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for kind in {"files", "copies"} & entry.keys():
            entry[kind] = tuple(PublicFile(**file) for file in entry[kind])
        found[name] = PublicSet(name, **entry)
    return found


PUBLIC_SETS = _read_catalog()
"""The datasets with files, by the name that ``fedblend data get`` takes."""


def data_home() -> Path:
    """The folder of all datasets: $FEDBLEND_DATA, or one in the user's cache."""
    chosen = os.environ.get("FEDBLEND_DATA")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedblend" / "data"


def public_sets(*names: str) -> tuple[PublicSet, ...]:
    """The public datasets of these names."""
    return tuple(PUBLIC_SETS[name] for name in names)


def find(name: str, *files: str) -> Path:
    """The path of the first of these files that exists, under any of its names."""
    dataset = PUBLIC_SETS[name]
    known = {file.name: file for file in (*dataset.files, *dataset.copies)}
    for file in files:
        path = dataset.path(known[file])
        if path is not None:
            return path
    advice = dataset.instruction or f"get it with: fedblend data get {name}"
    folder = data_home() / dataset.folder
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


def is_intact(file: PublicFile, path: Path) -> bool:
    """Whether the checksum of a file is right."""
    algorithm = "sha256" if len(file.checksum) == 64 else "md5"
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with open_unpacked(path) if file.unpacked else path.open("rb") as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error):
        return False
    return digest.hexdigest() == file.checksum


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
        if problem is None and is_intact(file, part):
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
    except (urllib.error.URLError, *_BROKEN) as error:
        reason = getattr(error, "reason", error)
        return " ".join(str(reason).split()) or type(reason).__name__
    if total is not None and done < total:
        return f"broke off after {done} of {total} bytes; run again to continue"
    return None
