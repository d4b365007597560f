# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node keeps on its disk: terms, states and answers, with checksums."""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedblend.core import PyTree
from fedblend.simulation.checkpoint import write_atomically
from fedblend.simulation.serialize import WireError, as_tree, pack, unpack

KEPT = 3
"""States: the one to start from, the newest, and one before in case the server itself
has to go back to its last checkpoint but one."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process of this node is answering a message."""
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_terms(place: Path, terms: Mapping[str, Any]) -> None:
    """Terms, for the owner to read."""
    content = {"terms": dict(terms), "sha256": _seal(terms)}
    write_atomically(place / "terms.json", json.dumps(content).encode())


def read_terms(place: Path) -> dict[str, Any]:
    """The terms of an experiment.

    Raises:
        FileNotFoundError: there are none.
        WireError: they are not what was written.
    """
    data = (place / "terms.json").read_bytes()
    try:
        content = json.loads(data.decode())
        terms = dict(content["terms"])
        whole = content["sha256"] == _seal(terms)
    except (ValueError, LookupError, TypeError, RecursionError):
        whole, terms = False, {}
    if not whole:
        raise WireError("terms: what was agreed is damaged on the disk of this node")
    return terms


def _seal(terms: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest()


def write_state(place: Path, round: int, state: PyTree, asked: str = "") -> None:
    """The state after a round, and a digest of the message that asked for it."""
    write_atomically(place / f"state-{round}", pack(state, {"asked": asked}))


def new_or_same(place: Path, round: int, asked: str) -> bool:
    """Whether no other message than this one can have asked for a round.

    States between two that were counted are removed: of a round before the newest one
    that has no state any more, nobody knows what asked for it.
    """
    try:
        _, words = unpack((place / f"state-{round}").read_bytes())
    except FileNotFoundError:
        return all(other < round for other in rounds(place))
    return words.get("asked") == asked


def write_answer(
    place: Path, round: int, asked: str, manner: str, answer: bytes
) -> None:
    """What leaves in a round; the message that asked, by its digest, and the manner in
    which it was answered.
    """
    write_atomically(place / f"answer-{round}", _key(asked, manner) + answer)


def _key(asked: str, manner: str) -> bytes:
    return f"{asked} {manner}\n".encode()


def read_answer(place: Path, round: int, asked: str, manner: str) -> bytes | None:
    """What left in that manner when that message asked for it, if it was kept, whole.

    The state that goes with it must be the one that is there.
    """
    key = _key(asked, manner)
    try:
        _, words = unpack((place / f"state-{round}").read_bytes())
        data = (place / f"answer-{round}").read_bytes()
        if words.get("asked") != asked or not data.startswith(key):
            return None
        unpack(data[len(key) :])
    except (FileNotFoundError, WireError):
        return None
    return data[len(key) :]


def read_state(place: Path, round: int, template: PyTree) -> PyTree:
    """The state after a round.

    Raises:
        WireError: there is none, or it is not what was written.
    """
    try:
        arrays, _ = unpack((place / f"state-{round}").read_bytes())
        return as_tree(arrays, template)
    except FileNotFoundError:
        raise WireError(
            f"state: that of round {round} is asked for, this node has "
            f"{sorted(rounds(place))}"
        ) from None
    except WireError as error:
        raise WireError(f"state: that of round {round}: {error}") from None


def seal_of_state(place: Path, round: int) -> str:
    """A hash of the state after a round; empty where there is none."""
    path = place / f"state-{round}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def rounds(place: Path) -> list[int]:
    """The rounds of which there is a state."""
    names = [re.fullmatch(r"state-(-?\d+)", entry.name) for entry in os.scandir(place)]
    return [int(name[1]) for name in names if name]


def forget(place: Path, base: int, newest: int) -> None:
    """Keep the two states in use, and the newest of those before.

    Newer ones stay: a message that comes late must not undo what was done since.
    """
    kept = sorted(rounds(place))
    before = [r for r in kept if r < base][: -(KEPT - 2)]
    between = [r for r in kept if base < r < newest]
    for round in before + between:
        for kind in ("state", "answer"):
            (place / f"{kind}-{round}").unlink(missing_ok=True)
