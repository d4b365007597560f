# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The least that a round of a federation can be: every node takes one step of 20 rows.

The size of the network is that of the messages; the rows are noise.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config.config import Config, check
from fedblend.runs.run_folder import Folder, read_rows

CLASSES = 10


def config(
    nodes: int, width: int, hidden: int, rounds: int, every: int = 1, **federation: Any
) -> Config:
    """An experiment.

    Args:
        nodes: clients, each on a node of its own.
        width: inputs of the network.
        hidden: its hidden units.
        rounds: of the experiment.
        every: rounds between two measurements.
        federation: keys of that table.
    """
    rows = {"kind": "classes", "classes": CLASSES, "shape": [width]}
    content: dict[str, Any] = {
        "version": 1,
        "name": "round",
        "data": {"partition": "nodes", "clients": nodes, **rows},
        "model": {"name": "mlp", "hidden": [hidden]},
        "algorithm": {"name": "fedavg", "rate": 0.1, "steps": 1, "batch_size": 20},
        "run": {"rounds": rounds, "every": every},
        "measure": {"local": False},
    }
    if federation:
        content["federation"] = federation
    return check(content, "benchmark")


def rows(seed: int, width: int, number: int = 200) -> dict[str, np.ndarray]:
    """The rows of a node."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(number, width)).astype(np.float32)
    return {"inputs": inputs, "targets": rng.integers(0, CLASSES, number)}


def seconds_of(out: Path) -> list[float]:
    """Seconds of each round of an experiment; measuring is left out."""
    return [row["seconds"] for row in read_rows(Folder(out)) if row["rounds"]]
