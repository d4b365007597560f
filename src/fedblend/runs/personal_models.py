# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The personal models of all clients in the folder of a run.

One file for each seed has the models of all clients, leaves [clients, ...]; see
``simulation.io.serialize``. Where all clients deploy the shared model there is no
such file. ``summary.json`` has under ``personal_models`` which of the three it is:
"kept", "shared" or "left out".
"""

import contextlib
from pathlib import Path

import jax
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, PyTree, shared_model
from fedblend.errors import RunError
from fedblend.mixing import shapes_of
from fedblend.runs.run_folder import Folder
from fedblend.simulation.io.serialize import (
    StackReader,
    StackWriter,
    WireError,
    as_tree,
)
from fedblend.simulation.run import Run

MOST_BYTES = 8 * 2**30
"""The models of all clients and seeds are kept up to this size by default."""
AT_ONCE = 256
"""Clients whose states are in memory at once, besides those of the run itself."""
KEPT, SHARED, LEFT_OUT = "kept", "shared", "left out"


def write_personal_models(
    folder: Folder,
    run: Run,
    seeds: list[int],
    algorithm: Algorithm,
    keep: str,
) -> tuple[str, list[str]]:
    """Write the personal models of a completed run, a file for each seed.

    Args:
        folder: the folder of the run.
        run: the run.
        seeds: the seed of each replica.
        algorithm: that of the run.
        keep: "auto", "always" or "never".

    Returns:
        What ``summary.json`` has under ``personal_models``, and a warning where "auto"
        leaves the models out.
    """
    if algorithm.personal is shared_model:
        return SHARED, []
    if keep == "never":
        return LEFT_OUT, []
    clients = run.federated_data.clients
    (first,) = run.personal_models([0])
    size = clients * sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    if keep == "auto" and size > MOST_BYTES:
        return LEFT_OUT, [
            f"the personal models of {clients} clients are {size / 2**30:.1f} GiB, and "
            'not in the run folder; run.keep_personal = "always" keeps them'
        ]
    several = run.replicas is not None
    template = trees.take(first, 0) if several else first
    with contextlib.ExitStack() as files:
        writers = []
        for seed in seeds:
            path = folder.personal(seed if several else None)
            facts = {"format": "fedblend", "seed": str(seed), "round": str(run.round)}
            writer = StackWriter(path, template, clients, facts)
            writers.append(files.enter_context(writer))
        for start in range(0, clients, AT_ONCE):
            ids = np.arange(start, min(start + AT_ONCE, clients))
            models = run.personal_models(ids)
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
            for replica, writer in enumerate(writers):
                own = (slice(None), replica) if several else slice(None)
                writer.add(trees.take(stacked, own))
    return KEPT, []


def open_personal_models(path: Path) -> StackReader:
    """The personal models of a file.

    Raises:
        RunError: there is no such file, or it is damaged.
    """
    try:
        return StackReader(path)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    except WireError as error:
        raise RunError(f"{path}: {error}") from None


def as_model(arrays: dict[str, np.ndarray], params: PyTree, where: Path) -> PyTree:
    """The model of these leaves: parameters, a ``Blend``, or ``Neighbors``.

    Args:
        arrays: the leaves by name.
        params: the shapes and dtypes of the parameters.
        where: the file that they are from.
    """
    try:
        return as_tree(arrays, shapes_of(arrays, params))
    except WireError as error:
        raise RunError(f"{where}: {error}") from None
