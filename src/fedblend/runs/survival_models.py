# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The Cox models that ``fedblend auto --event`` keeps, and what they predict.

``models.json`` has, by method and client, the coefficients of the inputs that
``preprocessing.json`` makes, and the survival of a row whose inputs are all 0 after
each time of an event. The survival of a row is that to the power of exp(risk).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.data.dataset import Task
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.errors import RunError, hint
from fedblend.runs import run_folder
from fedblend.runs.predict import NO_SHARED, TablePredictions, find_client, predict_rows
from fedblend.stats.survival import survive

MODELS, PREPROCESSING, CURVES = "models.json", "preprocessing.json", "curves.csv"
"""Files of the folder."""


def survival_of(
    model: Mapping[str, Any], inputs: np.ndarray, times: np.ndarray
) -> np.ndarray:
    """The chance to be without the event at some times, [rows, times].

    It is NaN after the last row of the client was seen.
    """
    curve = np.array([model["times"], model["survival"]])
    risk = np.exp(inputs @ np.array(model["coefficients"]))
    chances = survive(curve, times) ** risk[:, None]
    return np.where(times > model["last"], np.nan, chances)


class CoxModel(NamedTuple):
    """A model with what predicting needs, as of ``Portable``."""

    task: Task
    preprocessing: Preprocessing
    model: Mapping[str, Any]
    horizons: np.ndarray

    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """The risk of each row, and its survival at the horizons."""
        risk = inputs @ np.array(self.model["coefficients"])
        return np.column_stack([risk, survival_of(self.model, inputs, self.horizons)])


class SurvivalModels:
    """The models of a method in the folder of a comparison.

    Args:
        folder: of the comparison.
        method: by default the one to deploy.
    """

    def __init__(self, folder: Path, method: str | None = None):
        self.folder, path = folder, folder / MODELS
        self._found = run_folder.read_json(path)
        chosen = method or run_folder.read_comparison(folder)["deploy"]
        if chosen is None:
            raise RunError(
                f"{folder}: this comparison deploys nothing; {MODELS} has the models"
            )
        known = self._found["methods"]
        if chosen not in known:
            said = hint(chosen, [*known])
            raise RunError(f"method: {chosen!r} has no models in {path}; {said}")
        self._models: dict[str, Any] = known[chosen]
        self._shared = self._found["shared"].get(chosen)

    def model(self, client: int | str | None = None) -> CoxModel:
        """The model of a client, by id or by name, or the shared one."""
        names, found = [*self._models], self._shared
        if client is not None:
            found = self._models[names[find_client(client, names)]]
        if found is None:
            raise RunError(f"{self.folder}: no client sent anything{NO_SHARED}")
        horizons = np.array(self._found["horizons"])
        labels = tuple(f"to survive {time:g}" for time in horizons)
        kind: Any = "survival"
        task = Task(kind, 1, (len(self._found["inputs"]),), labels)
        fitted = Preprocessing.parse((self.folder / PREPROCESSING).read_text())
        return CoxModel(task, fitted, found, horizons)

    def predictions(
        self, source: Any, client: int | str | None = None, **options: Any
    ) -> TablePredictions:
        """Risks and survival of the rows of a table; arguments as of ``SavedRun``."""
        if options.pop("seed", None) is not None:
            raise RunError("seed: these models have none; leave it out")
        names, column = lambda: [*self._models], self._found["client"]
        return predict_rows(self.model, names, column, source, client, **options)

    def predict(self, source: Any, client: int | str | None = None) -> np.ndarray:
        """The risk of each row; ``predictions`` has survival, too."""
        return self.predictions(source, client).labels
