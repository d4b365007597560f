# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the server keeps on disk of secure sums.

The server writes how far it is with a sum before it asks for more. If it is killed, it
continues with the same attempt and the same sets: nodes send again what they have sent.
Nothing here tells a single client's answer: the server has the sum of the masked
answers, and boxes that it cannot open.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.errors import CheckpointError
from fedblend.simulation.serialize import (
    DAMAGE,
    WireError,
    pack,
    unpack,
    write_atomically,
)

SHARE, MASK, OPEN, OVER = "share", "mask", "open", "over"
"""What is asked for next; ``OVER`` is an attempt of which nothing was opened."""
PROGRESS_ROUNDS = 2
"""Whose files stay: the server may go back to the checkpoint before the newest one."""


@dataclass
class Progress:
    """An attempt at the sum of a round."""

    members: list[int]
    number: int = 0
    stage: str = SHARE
    told: list[str] = field(default_factory=list)
    """Hashes of the messages of all rounds, this one's last; none at enrollment."""
    digest: str = ""
    """Of the attempt, as nodes with their roster compute it."""
    least: int = 0
    """The most that a member demands of a sum."""
    nonces: dict[int, str] = field(default_factory=dict)
    """Of those who have shared."""
    answered: list[int] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    """Members of the next round, who share for it when they open this sum."""
    boxes: dict[int, np.ndarray] = field(default_factory=dict)
    seeds: dict[int, np.ndarray] = field(default_factory=dict)
    total: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """The sum of the masked answers."""


def write_progress(folder: Path, round: int, progress: Progress) -> None:
    """Write where an attempt is; files of older rounds are removed.

    Raises:
        CheckpointError: it could not be written.
    """
    words = {
        name: value
        for name, value in asdict(progress).items()
        if name not in ("boxes", "seeds", "total")
    }
    arrays = {
        "boxes": {str(c): array for c, array in progress.boxes.items()},
        "seeds": {str(c): array for c, array in progress.seeds.items()},
        "total": progress.total,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(
            _path(folder, round), pack(arrays, {"state": json.dumps(words)})
        )
        known = [re.fullmatch(r"secure-(-?\d+)", one.name) for one in folder.iterdir()]
        for old in sorted(int(name[1]) for name in known if name)[:-PROGRESS_ROUNDS]:
            _path(folder, old).unlink()
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None


def read_progress(folder: Path, round: int) -> Progress | None:
    """Where the newest attempt at a round is; None where there was none.

    Raises:
        CheckpointError: the file is not what was written.
    """
    path = _path(folder, round)
    try:
        arrays, metadata = unpack(path.read_bytes())
        words: dict[str, Any] = json.loads(metadata["state"])
        words["nonces"] = {int(c): str(n) for c, n in words["nonces"].items()}
        words |= {"boxes": {}, "seeds": {}, "total": arrays["['total']"]}
        for name, array in arrays.items():
            found = re.fullmatch(r"\['(boxes|seeds)'\]\['(\d+)'\]", name)
            if found:
                words[found[1]][int(found[2])] = array
        return Progress(**words)
    except FileNotFoundError:
        return None
    except (OSError, WireError, *DAMAGE) as error:
        raise CheckpointError(f"{path}: is damaged ({error})") from None


def _path(folder: Path, round: int) -> Path:
    return folder / f"secure-{round}"
