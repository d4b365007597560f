# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Results that are kept in a folder, so that a long claim goes on where it stopped."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from fedblend_reproductions.claims import commit, device, plain

T = TypeVar("T")
_ALONE: ContextVar[bool] = ContextVar("kept alone", default=False)


class NotKept(ValueError):
    """A result that is not kept, where nothing is to be measured."""


@contextmanager
def alone() -> Iterator[None]:
    """Nothing is measured in here: what is not kept raises ``NotKept``."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def present(
    names: Sequence[str], one: Callable[[str], T], needed: Sequence[str] = ()
) -> dict[str, T]:
    """``one`` of every name, without those that are neither kept nor needed."""
    found = {}
    for name in names:
        try:
            found[name] = one(name)
        except NotKept:
            if name in needed:
                raise
    return found


class Cache:
    """Answers of costly questions, one file each.

    An answer is used again only if everything it depends on is the same, which
    ``settings`` has to say. Each has the commit and the device that measured it.

    Args:
        folder: of the files; it is made when there is something to keep.
        settings: plain values that all answers depend on.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, plain(settings)

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """The kept answer, or a computed one, as plain values."""
        path = self.folder / f"{name.replace(' ', '_')}.json"
        if path.exists():
            known = json.loads(path.read_text())
            if known["settings"] == self.settings:
                return known["answer"]
        if _ALONE.get():
            raise NotKept(f"{path}: is not there, or has other settings than these")
        answer = plain(compute())
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {"commit": commit(), "device": device()}
        text = json.dumps({"settings": self.settings, "answer": answer, **told})
        # Renamed when it is whole: a run that is stopped leaves no half of a file.
        unfinished = path.with_suffix(".part")
        unfinished.write_text(text)
        os.replace(unfinished, path)
        return answer
