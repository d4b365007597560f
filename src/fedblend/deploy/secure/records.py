# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node keeps of secure sums, by round: what it shared, answered and opened.

::

    EXPERIMENT/shared-R    the attempt, and the secret that was drawn for it
    EXPERIMENT/masked-R    the answer of the newest attempt, and what was told before
    EXPERIMENT/opened-R    what was opened; after it the secret of the round is removed
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.simulation.serialize import pack, unpack, write_atomically

KINDS = ("shared", "masked", "opened")
ROUNDS = 3
"""Whose files stay: as many as a node keeps states."""


class Record(NamedTuple):
    """One file."""

    about: dict[str, Any]
    data: bytes


def write(
    place: Path, kind: str, round: int, about: dict[str, Any], data: bytes = b""
) -> None:
    """Write a file, whole or not at all."""
    content = pack(np.frombuffer(data, np.uint8), {"about": json.dumps(about)})
    write_atomically(place / f"{kind}-{round}", content)


def read(place: Path, kind: str, round: int) -> Record | None:
    """A file; None where there is none.

    Raises:
        WireError: it is not what was written.
    """
    try:
        arrays, metadata = unpack((place / f"{kind}-{round}").read_bytes())
    except FileNotFoundError:
        return None
    return Record(json.loads(metadata["about"]), arrays["value"].tobytes())


def newest(place: Path, kind: str) -> int:
    """The newest round of which there is a file of a kind; -2 where there is none."""
    return max(_rounds(place, kind), default=-2)


def remove(place: Path, kind: str, round: int) -> None:
    """Remove a file."""
    (place / f"{kind}-{round}").unlink(missing_ok=True)


def remove_old(place: Path) -> None:
    """Remove all but the newest files of each kind."""
    for kind in KINDS:
        for round in sorted(_rounds(place, kind))[:-ROUNDS]:
            remove(place, kind, round)


def _rounds(place: Path, kind: str) -> list[int]:
    names = [re.fullmatch(rf"{kind}-(-?\d+)", path.name) for path in place.iterdir()]
    return [int(name[1]) for name in names if name]
