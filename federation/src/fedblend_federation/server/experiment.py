# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the folder of an experiment has beside the checkpoint: who and how far.

``experiment.json`` names the experiment, ``nodes.json`` has the nodes that may take
part in it, ``progress.json`` the round that it is in.
"""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedblend.errors import RunError
from fedblend.runs import run_folder
from fedblend.simulation.io.serialize import write_atomically
from fedblend_federation.server.checkpoint import DAMAGE
from fedblend_federation.server.membership import Registered

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
    run_folder.write_text(folder / NODES, run_folder.as_json(content))


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
        run_folder.write_text(path, run_folder.as_json(drawn))
        path.chmod(0o600)
    experiment = run_folder.read_json(path).get("experiment")
    if not isinstance(experiment, str):
        raise RunError(f"{path}: is damaged: it has no experiment")
    return experiment
