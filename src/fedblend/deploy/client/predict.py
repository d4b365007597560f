# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node's own model says of new rows; nothing leaves the node for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree
from fedblend.data.readers.read import Task, read_inputs
from fedblend.deploy.client.storage import read_terms
from fedblend.deploy.contract import config_in, model_for, task_of
from fedblend.deploy.ops.settings import Node
from fedblend.errors import RunError
from fedblend.mixing import Apply, Blend, predict
from fedblend.simulation.precision import precision
from fedblend.simulation.serialize import WireError, as_tree, unpack

MODEL = "personal.safetensors"
TOGETHER = 1024
"""Rows that are computed at once: memory does not grow with the file."""


class Predicted(NamedTuple):
    """Predictions, one a row, and of which model they are."""

    values: list[Any]
    experiment: str
    round: str


def predicted(
    settings: Node, data: str | Path, experiment: str | None = None
) -> Predicted:
    """Predict rows by the model that an experiment left on this node.

    Args:
        settings: of the node.
        data: .csv, .parquet or .npz with the inputs; targets are not looked at.
        experiment: its id, which is the name of a folder; the newest if None.

    Raises:
        RunError: there is no such model, or it is damaged.
        DataError: the rows are not of the experiment's task.
    """
    place = _place(settings, experiment)
    config = config_in(_terms(place))
    task, rows = task_of(config), settings.data
    others = [name for name in (rows.target, rows.client) if name is not None]
    array = rows.inputs if isinstance(rows.inputs, str) else None
    inputs = read_inputs(data, task, inputs=array, others=others)
    with precision(config.run.precision):
        model = model_for(config)
        params = jax.eval_shape(model.init, jax.random.key(0))
        deployed, words = _deployed(place / MODEL, params)
        scores = np.concatenate(list(_scores(model.apply, deployed, inputs)))
    return Predicted(_answers(scores, task), place.name, words.get("round", ""))


def _place(settings: Node, experiment: str | None) -> Path:
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


def _deployed(path: Path, params: PyTree) -> tuple[PyTree, dict[str, str]]:
    """The model that the client uses: parameters, or two models and their weight."""
    try:
        arrays, words = unpack(path.read_bytes())
        template = params
        if ".alpha" in arrays:
            weight = jax.ShapeDtypeStruct((), jnp.result_type(float))
            template = Blend(weight, params, params)  # pyright: ignore
        return jax.tree.map(jnp.asarray, as_tree(arrays, template)), words
    except WireError as error:
        raise RunError(f"{path}: {error}") from None


def _scores(apply: Apply, model: PyTree, inputs: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(inputs), TOGETHER):
        rows = jnp.asarray(inputs[begin : begin + TOGETHER])
        yield np.asarray(predict(apply, model, rows))


def _answers(scores: np.ndarray, task: Task) -> list[Any]:
    """Names of classes, or numbers."""
    if task.kind == "regression":
        return scores.reshape(len(scores), -1)[:, 0].tolist()
    if task.kind == "binary" and scores.reshape(len(scores), -1).shape[1] == 1:
        found = (scores.reshape(-1) > 0).astype(int)
    else:
        found = scores.argmax(axis=-1)
    return [task.labels[number] if task.labels else number for number in found.tolist()]
