# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's books on disk: written after every step, whole or not at all.

Two generations are kept. If the newer one is damaged, the older is taken, and said so;
nodes still have the states it goes with. A lock keeps a second server away: after a
crash of the link two of them may be alive for a while.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.deploy.server.coordinator import Coordinator
from fedblend.deploy.server.settings import News
from fedblend.simulation.checkpoint import CheckpointError, sync, write_atomically
from fedblend.simulation.result import Record
from fedblend.simulation.serialize import WireError, as_tree, pack, unpack

VERSION = 1
_DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading words can come to that are not ours."""


class Busy(CheckpointError):
    """Another server has the books open."""


class ServerCheckpoint:
    """The folder in which a server keeps its books; the lock is held while it lives."""

    def __init__(self, folder: Path):
        self.path, self.older = folder / "books", folder / "books.older"
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Busy(f"{folder}: another server is writing its books there") from None

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def save(self, server: Coordinator, about: Mapping[str, Any]) -> None:
        """Write down where the server is, with some words of the caller's.

        Raises:
            CheckpointError: they could not be written; those of before are whole.
        """
        begun = server.down is not None
        content = {
            "server": (server.down, server.server) if begun else (),
            "ledger": server.ledger.snapshot(),
            "bases": server.bases,
            "requests": {str(c): asked for c, asked in sorted(server.requests.items())},
            "measured": server.measured,
        }
        words = {
            "fedblend": str(VERSION),
            "experiment": server.setting.experiment,
            "state": json.dumps(
                {
                    "begun": begun,
                    "round": server.round,
                    "news": server.news,
                    "records": [record.row() for record in server.records],
                    "requests": sorted(server.requests),
                    "measured": _names(server.measured),
                    "strays": server.strays,
                    "about": dict(about),
                }
            ),
        }
        # The new ones are whole and on disk before anything is moved.
        newest = self._folder / "books.newest"
        try:
            write_atomically(newest, pack(content, words))
            if self.path.exists():
                os.replace(self.path, self.older)
            os.replace(newest, self.path)
            sync(self._folder)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None

    def read(self) -> "Entry | None":
        """The newest books that are whole; None where there are none at all.

        Raises:
            CheckpointError: there are some, and none is whole.
        """
        complaints = []
        for path in (self.path, self.older):
            try:
                entry = Entry(path, *_opened(path), complaints)
            except FileNotFoundError:
                continue
            except (OSError, WireError) as error:
                complaints.append(f"{path}: {error}")
                continue
            if complaints:
                # The next books must not push out the ones that are whole.
                os.replace(self.path, self._folder / "books.damaged")
            return entry
        if complaints:
            raise CheckpointError("; ".join(complaints))
        return None


class Entry:
    """Books that were read."""

    def __init__(self, path: Path, arrays, experiment: str, state, complaints):
        self.path, self.experiment = path, experiment
        self.complaints: list[str] = complaints
        self._arrays, self._state = arrays, state
        self.about: dict[str, Any] = state["about"]

    def restore(self, server: Coordinator) -> None:
        """Take a freshly set up server to where the saved one was.

        Raises:
            CheckpointError: these are the books of another experiment or method.
        """
        state, shapes = self._state, server.shapes
        if self.experiment != server.setting.experiment:
            raise CheckpointError(
                f"{self.path}: are the books of experiment {self.experiment}, this is "
                f"{server.setting.experiment}"
            )
        column = jax.ShapeDtypeStruct(server.bases.shape, np.dtype(np.float64))
        try:
            content = as_tree(
                self._arrays,
                {
                    "server": (shapes.down, shapes.server) if state["begun"] else (),
                    "ledger": server.ledger.snapshot(),
                    "bases": server.bases,
                    "requests": dict.fromkeys(
                        map(str, state["requests"]), server.request
                    ),
                    "measured": jax.tree.map(lambda _: column, state["measured"]),
                },
            )
        except WireError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if state["begun"]:
            server.down, server.server = jax.tree.map(jnp.asarray, content["server"])
        server.ledger.restore(content["ledger"])
        server.bases = np.array(content["bases"])
        server.requests = {
            int(client): jax.tree.map(jnp.asarray, asked)
            for client, asked in content["requests"].items()
        }
        server.round, server.news = state["round"], state["news"]
        server.records = state["records"]
        server.measured = content["measured"]
        server.strays = state["strays"]


def _opened(path: Path) -> tuple[dict[str, np.ndarray], str, dict[str, Any]]:
    arrays, words = unpack(path.read_bytes())
    version = words.get("fedblend")
    if version != str(VERSION):
        raise WireError(f"is of version {version!r:.20}, this fedblend reads {VERSION}")
    try:
        state = json.loads(words["state"])
        return arrays, words["experiment"], _checked(state)
    except _DAMAGE as error:
        raise WireError(f"its words are damaged ({type(error).__name__})") from None


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """What the words say, of the types that it has to be of."""
    requests = [int(client) for client in state["requests"]]
    return {
        "begun": bool(state["begun"]),
        "round": int(state["round"]),
        "news": News(*state["news"]),
        "records": [Record.from_row(row) for row in state["records"]],
        "requests": sorted(requests),
        "measured": [_columns(names) for names in state["measured"]],
        "strays": Counter({str(k): int(v) for k, v in state["strays"].items()}),
        "about": dict(state["about"]),
    }


def _names(measured: list) -> list:
    return [
        {s: {m: sorted(v) for m, v in models.items()} for s, models in one.items()}
        for one in measured
    ]


def _columns(names: dict) -> dict:
    """The structure of ``measured``, with nothing in it."""
    return {
        split: {model: dict.fromkeys(metrics, 0) for model, metrics in by.items()}
        for split, by in names.items()
    }
