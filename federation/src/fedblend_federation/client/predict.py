# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Predictions of new rows by the model that an experiment left on a node.

Nothing leaves the node.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree
from fedblend.data.dataset import Task
from fedblend.data.readers.read import read_inputs
from fedblend.errors import RunError
from fedblend.mixing import predict, shapes_of
from fedblend.simulation.serialize import WireError, build_tree, unpack
from fedblend.trees import precision
from fedblend_federation.client.build import locate_base
from fedblend_federation.client.state import MODEL, read_terms
from fedblend_federation.contract import parse_contract
from fedblend_federation.ops.settings import ClientSettings
from fedblend_federation.raw_tables import preprocessing_in

BATCH = 1024
"""Rows that are computed at once: memory does not grow with the file."""


class Predictions(NamedTuple):
    """Predictions, one a row, and the experiment and round of their model."""

    values: list[Any]
    experiment: str
    round: str


def predict_rows(
    settings: ClientSettings, data: str | Path, experiment: str | None = None
) -> Predictions:
    """Predict rows by the model that an experiment left on this node.

    Args:
        settings: of the client.
        data: .csv, .parquet or .npz with the inputs; targets are ignored.
        experiment: its id, which is the name of a folder; the newest if None.

    Raises:
        RunError: there is no such model, or it is damaged.
        DataError: the rows are not of the experiment's task.
    """
    place = _place(settings, experiment)
    terms, rows = _terms(place), settings.data
    contract = locate_base(parse_contract(terms["config"]), settings.bases)
    fitted = None
    if contract.schema is not None:
        fitted = preprocessing_in(contract.schema, terms)
    others = [name for name in (rows.target, rows.client) if name is not None]
    array = rows.inputs if isinstance(rows.inputs, str) else None
    inputs = read_inputs(
        data, contract.task, inputs=array, others=others, preprocessing=fitted
    )
    with precision(contract.config.run.precision):
        apply = contract.model.apply
        model, metadata = _read_model(place / MODEL, contract.params)
        scores = np.concatenate(
            [
                np.asarray(predict(apply, model, jnp.asarray(inputs[at : at + BATCH])))
                for at in range(0, len(inputs), BATCH)
            ]
        )
    values = _predictions(scores, contract.task)
    return Predictions(values, place.name, metadata.get("round", ""))


def _place(settings: ClientSettings, experiment: str | None) -> Path:
    """The folder of an experiment that left a model."""
    models = sorted(
        settings.folder.glob(f"*/{MODEL}"), key=lambda path: path.stat().st_mtime_ns
    )
    if not models:
        raise RunError(
            f"{settings.folder}: no experiment has left a model here yet; the first "
            "comes with the first measurement"
        )
    places = {path.parent.name: path.parent for path in models}
    if experiment is None:
        return models[-1].parent
    if experiment not in places:
        raise RunError(
            f"--experiment: {experiment} has left no model here; those that have: "
            f"{', '.join(places)}"
        )
    return places[experiment]


def _terms(place: Path) -> dict[str, Any]:
    try:
        return read_terms(place)
    except OSError as error:
        raise RunError(f"{place / 'terms.json'}: {error.strerror}") from None
    except WireError as error:
        raise RunError(f"{place}: {error}") from None


def _read_model(path: Path, params: PyTree) -> tuple[PyTree, dict[str, str]]:
    """The model that the client deploys: parameters, or a ``Blend``."""
    try:
        arrays, metadata = unpack(path.read_bytes())
        model = build_tree(arrays, shapes_of(arrays, params))
        return jax.tree.map(jnp.asarray, model), metadata
    except WireError as error:
        raise RunError(f"{path}: {error}") from None


def _predictions(scores: np.ndarray, task: Task) -> list[Any]:
    """Names of classes, or numbers."""
    if task.kind == "regression":
        return task.restore_unit(scores.reshape(len(scores), -1)[:, 0]).tolist()
    if task.kind == "binary" and scores.reshape(len(scores), -1).shape[1] == 1:
        found = (scores.reshape(-1) > 0).astype(int)
    else:
        found = scores.argmax(axis=-1)
    return [task.labels[number] if task.labels else number for number in found.tolist()]
