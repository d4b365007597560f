# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a server keeps beside where it is: its name, what nodes said of themselves, and
how often a round may have been counted twice.
"""

import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.deploy.server.attendance import Known, together
from fedblend.deploy.server.checkpoint import Entry
from fedblend.errors import RunError
from fedblend.experiments import run_folder
from fedblend.simulation.checkpoint import CheckpointError

_DAMAGE = (LookupError, TypeError, ValueError, AttributeError)


class Identity(NamedTuple):
    """The name of an experiment, and the server's secret."""

    experiment: str
    secret: int


class Recalled(NamedTuple):
    """What the books say beside where the server is."""

    known: Known | None = None
    """What nodes said, once all have."""
    redone: int = 0
    """Rounds that may be counted a second time, because newer books were damaged."""

    def words(self) -> dict[str, Any]:
        """For the books, as JSON has it."""
        if self.known is None:
            return {"redone": self.redone}
        counts, rooms, constants, silent = self.known
        told = None
        if constants is not None:
            pairs = zip(constants.smooth, constants.convex, strict=True)
            told = [(float(L), float(mu), constants.exact) for L, mu in pairs]
        return {
            "counts": {name: held.tolist() for name, held in counts.items()},
            "rooms": rooms,
            "constants": told,
            "silent": silent,
            "redone": self.redone,
        }


def recalled(entry: Entry | None) -> Recalled:
    """What books say; nothing where there are none.

    Raises:
        CheckpointError: what they say cannot be used.
    """
    if entry is None:
        return Recalled()
    about = entry.about
    try:
        counts = {
            str(name): np.array([int(count) for count in held], np.int64)
            for name, held in about["counts"].items()
        }
        rooms = {str(name): int(room) for name, room in about["rooms"].items()}
        told = about["constants"]
        known = Known(
            counts,
            rooms,
            None
            if told is None
            else together([(float(L), float(mu), bool(e)) for L, mu, e in told]),
            tuple(int(client) for client in about["silent"]),
        )
        # Older books are one step behind.
        return Recalled(known, int(about["redone"]) + bool(entry.complaints))
    except _DAMAGE as error:
        raise CheckpointError(
            f"{entry.path}: its words are damaged ({type(error).__name__})"
        ) from None


def identity(path: Path) -> Identity:
    """Who the server of an experiment is, drawn once.

    Raises:
        RunError: the file is damaged.
    """
    if not path.exists():
        drawn = Identity(secrets.token_hex(8), secrets.randbits(63))
        run_folder.write_text(path, run_folder.as_json(drawn._asdict()))
        path.chmod(0o600)
    said = run_folder.read_json(path)
    experiment, secret = said.get("experiment"), said.get("secret")
    if not isinstance(experiment, str) or not isinstance(secret, int):
        raise RunError(f"{path}: is damaged: it has no experiment and no secret")
    return Identity(experiment, secret)
