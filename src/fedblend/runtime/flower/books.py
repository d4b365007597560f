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

from fedblend.runtime.checkpoint import CheckpointError, write_atomically
from fedblend.runtime.flower.server import News, Server
from fedblend.runtime.record import Record
from fedblend.runtime.wire import WireError, as_tree, pack, unpack

VERSION = 1


class Books:
    """The folder in which a server keeps its books; the lock is held while it lives."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path, self.older = folder / "books", folder / "books.older"
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CheckpointError(
                f"{folder}: another server is writing its books there"
            ) from None

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def save(self, server: Server, about: Mapping[str, Any]) -> None:
        """Write down where the server is, with some words of the caller's."""
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
        if self.path.exists():
            os.replace(self.path, self.older)
        write_atomically(self.path, pack(content, words))

    def read(self) -> "Entry | None":
        """The newest books that are whole; None where there are none at all."""
        complaints = []
        for path in (self.path, self.older):
            try:
                return Entry(path, *_opened(path), complaints)
            except FileNotFoundError:
                continue
            except (WireError, ValueError, KeyError, TypeError) as error:
                complaints.append(f"{path}: {error}")
        if complaints:
            raise CheckpointError("; ".join(complaints))
        return None


class Entry:
    """Books that were read."""

    def __init__(self, path: Path, arrays, experiment: str, state, complaints):
        self.path, self.experiment = path, experiment
        self.complaints: list[str] = complaints
        self._arrays, self._state = arrays, state
        self.about: dict[str, Any] = dict(state["about"])

    def restore(self, server: Server) -> None:
        """Take a freshly set up server to where the saved one was."""
        state, shapes = self._state, server.shapes
        try:
            content = as_tree(
                self._arrays,
                {
                    "server": (shapes.down, shapes.server) if state["begun"] else (),
                    "ledger": server.ledger.snapshot(),
                    "bases": server.bases,
                    "requests": dict.fromkeys(
                        map(str, sorted(state["requests"])), server.request
                    ),
                    "measured": [
                        _columns(names, server.federation.clients)
                        for names in state["measured"]
                    ],
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
        server.round, server.news = state["round"], News(*state["news"])
        server.records = [Record.from_row(row) for row in state["records"]]
        server.measured = content["measured"]
        server.strays = Counter(state["strays"])


def _opened(path: Path) -> tuple[dict[str, np.ndarray], str, dict[str, Any]]:
    arrays, words = unpack(path.read_bytes())
    if not words["fedblend"].isdecimal() or int(words["fedblend"]) > VERSION:
        raise ValueError(f"version {words['fedblend']} is newer than this fedblend")
    return arrays, words["experiment"], json.loads(words["state"])


def _names(measured: list) -> list:
    return [
        {s: {m: sorted(v) for m, v in models.items()} for s, models in one.items()}
        for one in measured
    ]


def _columns(names: dict, clients: int) -> dict:
    column = jax.ShapeDtypeStruct((clients,), np.dtype(np.float64))
    return {
        split: {model: dict.fromkeys(metrics, column) for model, metrics in by.items()}
        for split, by in names.items()
    }
