# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Predictions of new rows by the model that an experiment left on a node.

Nothing leaves the node.
"""

from pathlib import Path
from typing import Any, NamedTuple

from fedblend.core import PyTree
from fedblend.data.readers.read import read_inputs
from fedblend.errors import RunError
from fedblend.runs.export.portable import Portable
from fedblend.runs.predict import predictions_of
from fedblend.runs.run_folder import model_like
from fedblend.simulation.serialize import WireError, unpack
from fedblend.trees import precision
from fedblend_federation.client.build import locate_base
from fedblend_federation.client.state import MODEL, read_terms
from fedblend_federation.contract import parse_contract
from fedblend_federation.ops.settings import ClientSettings
from fedblend_federation.raw_tables import preprocessing_in


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
        model, about = _read_model(place / MODEL, contract.params)
    portable = Portable(contract.config, contract.task, model)
    values = predictions_of(portable, portable.outputs(inputs)).labels.tolist()
    return Predictions(values, place.name, about.get("round", ""))


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
        arrays, about = unpack(path.read_bytes())
    except WireError as error:
        raise RunError(f"{path}: {error}") from None
    return model_like(arrays, params, path), about
