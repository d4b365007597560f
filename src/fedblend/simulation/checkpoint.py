# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Saving a run between two blocks, and going on from there, bit for bit.

A checkpoint is one file in the layout of ``serialize``: the server's state, all client
states (for a disk store the rows its last block changed), the bits sent, and the
records. It is written beside its place, synced, and moved there, so there is always a
whole one. Keys come from numbers, so there is no generator to save. Noise for privacy
is not in it: a private run goes on with new noise.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend.errors import CheckpointError
from fedblend.simulation.result import Record
from fedblend.simulation.run import Run
from fedblend.simulation.sampling import Strata
from fedblend.simulation.serialize import (
    WireError,
    build_tree,
    pack,
    pack_named,
    unpack,
    write_atomically,
)
from fedblend.simulation.stores.disk_store import StoreError

VERSION = 3
"""The layout of checkpoints; 2 had other names of what algorithms add to messages."""


def save(path: Path, run: Run, about: Mapping[str, str] | None = None) -> None:
    """Save the run as it is now, with some words of the caller's."""
    words = {
        "fedblend": str(VERSION),
        "round": str(run.round),
        "plan": json.dumps(_plan(run)),
        "records": json.dumps(jax.tree.map(Record.row, run.records)),
        "about": json.dumps(dict(about or {})),
    }
    write_atomically(path, pack(run.snapshot(), words))


def read_about(path: Path) -> dict[str, str]:
    """The words that were saved with a checkpoint."""
    return _open(path)[1]["about"]


def copy(path: Path, to: Path, about: Mapping[str, str]) -> None:
    """Put a checkpoint in another place, with some other words of the caller's."""
    try:
        arrays, words = unpack(path.read_bytes())
    except WireError as error:
        raise _error(path, error) from None
    words["about"] = json.dumps({**json.loads(words["about"]), **about})
    write_atomically(to, pack_named(arrays, words))


def restore(path: Path, run: Run) -> None:
    """Take a freshly set up run to where the saved one was."""
    arrays, words = _open(path)
    run.use_store(words["plan"].get("store"))
    for name, value in _plan(run).items():
        saved = words["plan"].get(name)
        if saved != value:
            raise _error(path, f"was made with {name} {saved}, this run has {value}")
    try:
        changed = len(arrays.get("['store']['ids']", ()))
        content = build_tree(arrays, run.snapshot_template(changed))
        run.restore(content, words["round"], words["records"])
    except (WireError, StoreError) as error:
        raise _error(path, error) from None


def _open(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays, and the words that were saved with them, read."""
    try:
        arrays, words = unpack(path.read_bytes())
    except OSError as error:
        raise _error(path, error.strerror) from None
    except WireError as error:
        raise _error(path, error) from None
    version = str(words.get("fedblend", ""))
    if not version.isdecimal():
        raise _error(path, "not a fedblend checkpoint")
    if int(version) != VERSION:
        raise _error(
            path,
            f"is of version {version}, and this fedblend reads {VERSION}; go on with "
            "the fedblend that wrote it, or begin the run again in another folder",
        )
    try:
        return arrays, {
            "round": int(words["round"]),
            "plan": dict(json.loads(words["plan"])),
            "records": jax.tree.map(
                Record.read_row,
                json.loads(words["records"]),
                is_leaf=lambda node: isinstance(node, dict),
            ),
            "about": dict(json.loads(words["about"])),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _error(path, f"its words are damaged ({type(error).__name__})") from None


def _error(path: Path, why: Any) -> CheckpointError:
    return CheckpointError(f"checkpoint {path}: {why}")


def _plan(run: Run) -> dict[str, Any]:
    """What must not change between saving and restoring."""
    keys, asked = np.asarray(jax.random.key_data(run.key)), run.cohorts.asked
    return {
        "clients": run.federated_data.clients,
        "cohort": run.cohort,
        "strata": _digest(run.cohorts.strata),
        "epoch": asked.epoch,
        "separation": asked.separation,
        # None for all that older checkpoints know.
        "sampling": None if asked.sampling == "fixed" else asked.sampling,
        "every": run.every,
        "chunk": run.settings.chunk,
        "weight": run.settings.everyone,
        "dropout": run.settings.dropout,
        "reduction": run.settings.reduction.name,
        "replicas": run.replicas,
        "key": keys.tolist(),
        "store": run.store_kind,
    }


def _digest(strata: Strata | None) -> list[Any] | None:
    if strata is None:
        return None
    of = zlib.crc32(np.asarray(strata.of, np.int64).tobytes())
    return [of, list(strata.weights), list(strata.sizes or ())]
