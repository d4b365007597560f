# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A cache of measurements in a folder: a long claim resumes where it stopped."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from fedblend_reproductions.claims import commit, device, plain

T = TypeVar("T")
_READ_ONLY: ContextVar[bool] = ContextVar("read only", default=False)


class NotCached(ValueError):
    """A measurement is not in the cache, and nothing may be measured."""


@contextmanager
def read_only() -> Iterator[None]:
    """Measure nothing in this context: what is not cached raises ``NotCached``."""
    token = _READ_ONLY.set(True)
    try:
        yield
    finally:
        _READ_ONLY.reset(token)


def available(
    names: Sequence[str], measure: Callable[[str], T], needed: Sequence[str] = ()
) -> dict[str, T]:
    """``measure(name)`` by name, without those that are neither cached nor needed."""
    found = {}
    for name in names:
        try:
            found[name] = measure(name)
        except NotCached:
            if name in needed:
                raise
    return found


class Cache:
    """Measurements by name, one JSON file each.

    A file is used again only if its settings are the same. It records the commit and
    the device of its measurement.

    Args:
        folder: of the files; made when there is something to write.
        settings: plain values that all measurements of this cache depend on.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, plain(settings)

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """The cached measurement, or that of ``compute()``, as plain values."""
        path = self.folder / f"{name.replace(' ', '_')}.json"
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["settings"] == self.settings:
                return stored["answer"]
        if _READ_ONLY.get():
            raise NotCached(f"{path}: is not there, or was measured in other settings")
        answer = plain(compute())
        self.folder.mkdir(parents=True, exist_ok=True)
        source = {"commit": commit(), "device": device()}
        text = json.dumps({"settings": self.settings, "answer": answer, **source})
        # Renamed when complete: a run that is stopped leaves no partial file.
        unfinished = path.with_suffix(".part")
        unfinished.write_text(text)
        os.replace(unfinished, path)
        return answer
