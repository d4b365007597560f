# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node keeps of secure sums: a secret, and what it answered and opened.

::

    EXPERIMENT/secure.secret  drawn at random, once for an experiment
    EXPERIMENT/masked-R       the newest attempt at round R that was answered: what the
                              node was told before, and its answer without masks
    EXPERIMENT/opened-R       what the node gave to open the sum of round R

That a sum was opened is in the ledger, too, which outlives these files.
"""

import json
import mmap
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.simulation.io.serialize import pack, read_header, unpack, write_atomically

KINDS = ("masked", "opened")
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


def about(place: Path, kind: str, round: int) -> dict[str, Any]:
    """The words of a file, without its data; none where there is no such file.

    Raises:
        WireError: it is not what was written.
    """
    try:
        with (
            open(place / f"{kind}-{round}", "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
            memoryview(data) as view,
        ):
            _, metadata, body = read_header(view)
            body.release()
    except FileNotFoundError:
        return {}
    return json.loads(metadata["about"])


def remove_old(place: Path) -> None:
    """Remove all but the newest files of each kind."""
    for kind in KINDS:
        for round in sorted(rounds(place, kind))[:-ROUNDS]:
            (place / f"{kind}-{round}").unlink(missing_ok=True)


def rounds(place: Path, kind: str) -> list[int]:
    """The rounds of which there is a file of a kind."""
    names = [re.fullmatch(rf"{kind}-(-?\d+)", path.name) for path in place.iterdir()]
    return [int(name[1]) for name in names if name]
