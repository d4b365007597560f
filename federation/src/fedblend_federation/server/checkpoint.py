# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of an experiment at the server: its checkpoint, and who and how far.

The checkpoint is written after every step, whole or not at all, and the folder keeps
two generations. If the newer one is damaged, the server continues from the older one
and notes it in the audit; nodes still have the states that belong to it. A lock keeps a
second server away: after a crash of the link two of them may be alive for a while.

``experiment.json`` names the experiment, ``nodes.json`` has the nodes that may take
part in it, ``progress.json`` the round that it is in.
"""

import fcntl
import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.errors import CheckpointError, RunError
from fedblend.runs import run_folder
from fedblend.simulation.result import Record
from fedblend.simulation.serialize import (
    DAMAGE,
    WireError,
    build_tree,
    pack,
    sync,
    unpack,
    write_atomically,
)
from fedblend_federation.server.coordinator import INTERVAL, Coordinator
from fedblend_federation.server.membership import Description, Registered

VERSION = 5


class Busy(CheckpointError):
    """Another server has the folder open."""


class ServerCheckpoint:
    """The folder of a server's checkpoint; the lock is held while it is open."""

    def __init__(self, folder: Path):
        self.path, self.previous = folder / "checkpoint", folder / "checkpoint.previous"
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: cannot keep checkpoints here: {error.strerror}"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Busy(f"{folder}: another server is running there") from None

    def close(self) -> None:
        """Release the folder."""
        os.close(self._lock)

    def save(self, server: Coordinator, about: Mapping[str, Any]) -> None:
        """Write where the server is, with some JSON of the caller's.

        Raises:
            CheckpointError: it could not be written; the one before is whole.
        """
        started, rows = server.down is not None, self._rows
        rows += [record.row() for record in server.records[len(rows) :]]
        content = {
            "server": (server.down, server.server) if started else (),
            "ledger": server.ledger.snapshot(),
            "bases": server.bases,
            "requests": {str(c): asked for c, asked in sorted(server.requests.items())},
            "measured": server.measured,
        }
        state = {
            "started": started,
            "round": server.round,
            "interval": server.interval,
            "records": rows,
            "requests": sorted(server.requests),
            "measured": [
                {
                    s: {m: sorted(v) for m, v in models.items()}
                    for s, models in one.items()
                }
                for one in server.measured
            ],
            "strays": server.exchanges.strays,
            "norms": server.norm_history.norms,
            "about": dict(about),
        }
        metadata = {
            "fedblend": str(VERSION),
            "experiment": server.setup.experiment,
            "state": json.dumps(state),
        }
        # The new one is whole and on disk before anything is moved.
        newest = self._folder / "checkpoint.newest"
        try:
            write_atomically(newest, pack(content, metadata))
            if self.path.exists():
                os.replace(self.path, self.previous)
            os.replace(newest, self.path)
            sync(self._folder)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None

    def read(self) -> "Saved | None":
        """The newest checkpoint that is whole; None where there is none at all.

        Raises:
            CheckpointError: there are some, and none is whole.
        """
        old = self._folder / "books"
        if old.exists():
            raise CheckpointError(
                f"{old}: was written by an earlier fedblend, and this one cannot go on "
                "from it; start again in another folder"
            )
        damage: list[str] = []
        for path in (self.path, self.previous):
            try:
                saved = _open(path, damage)
            except FileNotFoundError:
                continue
            except (OSError, WireError) as error:
                damage.append(f"{path}: {error}")
                continue
            if damage:
                # The next checkpoint must not replace the one that is whole.
                os.replace(self.path, self._folder / "checkpoint.damaged")
            return saved
        if damage:
            raise CheckpointError("; ".join(damage))
        return None


class Saved(NamedTuple):
    """A checkpoint that was read."""

    path: Path
    experiment: str
    arrays: dict[str, np.ndarray]
    state: dict[str, Any]
    damage: list[str]
    """What is wrong with newer ones."""

    def restore(self, server: Coordinator) -> None:
        """Take a freshly set up server to where the saved one was.

        Raises:
            CheckpointError: it is the checkpoint of another experiment or method.
        """
        state, shapes = self.state, server.shapes
        if self.experiment != server.setup.experiment:
            raise CheckpointError(
                f"{self.path}: is a checkpoint of experiment {self.experiment}, and "
                f"the server runs {server.setup.experiment}; give each its own folder"
            )
        column = jax.ShapeDtypeStruct(server.bases.shape, np.dtype(np.float64))
        template = {
            "server": (shapes.down, shapes.server) if state["started"] else (),
            "ledger": server.ledger.snapshot(),
            "bases": server.bases,
            "requests": {str(client): server.request for client in state["requests"]},
            "measured": jax.tree.map(lambda _: column, state["measured"]),
        }
        try:
            content = build_tree(self.arrays, template)
        except WireError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if state["started"]:
            server.down, server.server = jax.tree.map(jnp.asarray, content["server"])
        server.ledger.restore(content["ledger"])
        server.bases = np.array(content["bases"])
        server.requests = {
            int(client): jax.tree.map(jnp.asarray, asked)
            for client, asked in content["requests"].items()
        }
        server.round, server.interval = state["round"], state["interval"]
        server.records, server.measured = state["records"], content["measured"]
        server.exchanges.strays = state["strays"]
        server.norm_history.norms = state["norms"]


def _open(path: Path, damage: list[str]) -> Saved:
    arrays, metadata = unpack(path.read_bytes())
    version = metadata.get("fedblend")
    if version != str(VERSION):
        raise WireError(f"is of version {version!r:.20}, this fedblend reads {VERSION}")
    try:
        state = json.loads(metadata["state"])
        checked = {
            "started": bool(state["started"]),
            "round": int(state["round"]),
            "interval": {name: +state["interval"][name] for name in INTERVAL},
            "records": [Record.read_row(row) for row in state["records"]],
            "requests": sorted(int(client) for client in state["requests"]),
            "measured": [_columns(names) for names in state["measured"]],
            "strays": Counter({str(k): int(v) for k, v in state["strays"].items()}),
            "norms": [tuple(map(float, norms)) for norms in state["norms"]],
            "about": dict(state["about"]),
        }
        return Saved(path, metadata["experiment"], arrays, checked, damage)
    except DAMAGE as error:
        raise WireError(f"its metadata are damaged ({type(error).__name__})") from None


def _columns(names: dict) -> dict:
    """The structure of ``measured``, with nothing in it."""
    return {
        split: {model: dict.fromkeys(metrics, 0) for model, metrics in by.items()}
        for split, by in names.items()
    }


def plain_descriptions(
    found: Mapping[int, Description], repeated: int
) -> dict[str, Any]:
    """What a checkpoint holds beside the coordinator's own state.

    Args:
        found: what clients described when the experiment began.
        repeated: rounds that may count a second time, because newer checkpoints were
            damaged.
    """
    clients = {str(c): [one.counts, one.constants] for c, one in found.items()}
    return {"clients": clients, "repeated": repeated}


def read_descriptions(saved: Saved | None) -> tuple[dict[int, Description] | None, int]:
    """The arguments of ``plain_descriptions`` in a checkpoint; None and 0 without one.

    Raises:
        CheckpointError: it cannot be used.
    """
    if saved is None:
        return None, 0
    about = saved.state["about"]
    try:
        found = {
            int(client): Description(counts, constants and tuple(constants))
            for client, (counts, constants) in about["clients"].items()
        }
        # An older checkpoint is one step behind.
        return found, int(about["repeated"]) + bool(saved.damage)
    except DAMAGE as error:
        raise CheckpointError(
            f"{saved.path}: its metadata are damaged ({type(error).__name__})"
        ) from None


PROGRESS = "progress.json"
NODES = "nodes.json"


def write_progress(folder: Path, round: int, rounds: int) -> None:
    """Write the round that an experiment is in, for ``read_progress``."""
    text = json.dumps({"round": round, "rounds": rounds})
    write_atomically(folder / PROGRESS, text.encode())


def read_progress(folder: Path) -> tuple[int, int]:
    """The round that an experiment is in, and how many there are; 0 if unknown."""
    try:
        found = run_folder.read_json(folder / PROGRESS)
        return int(found["round"]), int(found["rounds"])
    except (RunError, KeyError, TypeError, ValueError):
        return 0, 0


class Nodes(NamedTuple):
    """The nodes of a federation, as ``submit`` found them registered at the link."""

    registered: Mapping[int, Registered] | None = None
    """By the link's number of a node, which belongs to its key; None if unknown."""
    retired: tuple[int, ...] = ()
    """Clients that have left; their numbers are not given to others."""

    @property
    def names(self) -> dict[int, str]:
        """The names of the nodes, by client."""
        known = (self.registered or {}).values()
        return {client: one.name for one in known for client in one.clients}


def write_nodes(folder: Path, nodes: Nodes) -> None:
    """Write the nodes of a federation, for ``read_nodes``."""
    known = nodes.registered
    if known is not None:
        known = {str(at): [one.name, *one.clients] for at, one in known.items()}
    content = {"registered": known, "retired": list(nodes.retired)}
    run_folder.write_text(folder / NODES, run_folder.json_text(content))


def read_nodes(folder: Path) -> Nodes:
    """The nodes that may take part in an experiment.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / NODES
    if not path.exists():
        return Nodes()
    found = run_folder.read_json(path)
    try:
        known = found["registered"]
        if known is not None:
            known = {
                int(at): Registered(str(name), tuple(map(int, clients)))
                for at, (name, *clients) in known.items()
            }
        return Nodes(known, tuple(int(client) for client in found["retired"]))
    except DAMAGE as error:
        raise RunError(f"{path}: is damaged ({type(error).__name__})") from None


def identity(path: Path) -> str:
    """The name of an experiment, drawn once and stored in this file.

    Raises:
        RunError: the file is damaged.
    """
    if not path.exists():
        drawn = {"experiment": secrets.token_hex(8)}
        run_folder.write_text(path, run_folder.json_text(drawn))
        path.chmod(0o600)
    experiment = run_folder.read_json(path).get("experiment")
    if not isinstance(experiment, str):
        raise RunError(f"{path}: is damaged: it has no experiment")
    return experiment
