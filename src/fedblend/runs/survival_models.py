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

from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.data.readers.tables import check_names, read_table
from fedblend.errors import RunError, hint
from fedblend.runs import run_folder
from fedblend.runs.predict import name_clients
from fedblend.stats.survival import survive

MODELS, PREPROCESSING, CURVES = "models.json", "preprocessing.json", "curves.csv"
"""Files of the folder."""


class SurvivalPredictions(NamedTuple):
    """What models say about the rows of a table."""

    labels: np.ndarray
    """The risk of each row: the logarithm of its hazard next to a row's of the same
    client whose inputs are all 0, which numbers are at their mean."""
    probabilities: np.ndarray
    """The chance to be without the event at each horizon, [rows, horizons]; NaN after
    the last row of the client was seen."""
    horizons: tuple[float, ...]
    clients: tuple[str, ...] | None = None
    """Whose model each row got, where rows have different ones."""

    def columns(self, probabilities: bool = True) -> dict[str, Any]:
        """The columns of a table of predictions; rows are counted from 0."""
        found: dict[str, Any] = {"row": list(range(len(self.labels)))}
        if self.clients is not None:
            found["client"] = list(self.clients)
        found["risk"] = self.labels.tolist()
        for time, chances in zip(self.horizons, self.probabilities.T, strict=True):
            found[f"survival {time:g}"] = [
                "" if np.isnan(one) else one for one in chances.tolist()
            ]
        return found


def survival_of(
    model: Mapping[str, Any], inputs: np.ndarray, times: np.ndarray
) -> np.ndarray:
    """The chance to be without the event at some times, [rows, times]."""
    curve = np.array([model["times"], model["survival"]])
    risk = np.exp(inputs @ np.array(model["coefficients"]))
    chances = survive(curve, times) ** risk[:, None]
    return np.where(times > model["last"], np.nan, chances)


class SurvivalModels:
    """The models of a method in the folder of a comparison.

    Args:
        folder: of the comparison.
        method: by default the one to deploy.
    """

    def __init__(self, folder: Path, method: str | None = None):
        state = run_folder.read_comparison(folder)
        path = folder / MODELS
        found = run_folder.read_json(path)
        self.folder, chosen = folder, method or state["deploy"]
        if chosen is None:
            raise RunError(
                f"{folder}: this comparison deploys nothing; {MODELS} has the models"
            )
        if chosen not in found["methods"]:
            known = hint(chosen, [*found["methods"]])
            raise RunError(f"method: {chosen!r} has no models in {path}; {known}")
        self._models: dict[str, Any] = found["methods"][chosen]
        self._shared: Any = found["shared"].get(chosen)
        self.column: str = found["client"]
        self.horizons = np.array(found["horizons"])
        text = (folder / PREPROCESSING).read_text()
        self.preprocessing = Preprocessing.parse(text)

    def predictions(
        self,
        source: Any,
        client: str | None = None,
        *,
        shared: bool = False,
        seed: int | None = None,
    ) -> SurvivalPredictions:
        """Risks and survival of the rows of a table; arguments as of ``SavedRun``."""
        if seed is not None:
            raise RunError("seed: these models have none; leave it out")
        if shared and client is not None:
            raise RunError("client: is given, and the shared model is asked for, too")
        table, names = read_table(source), None
        if client is None and not shared and self.column in table.columns:
            names = name_clients(table, self.column, [*self._models])
        needed = self.preprocessing.columns
        check_names(needed, [*table.columns], "column", table.where)
        inputs = self.preprocessing.transform(table.columns)
        risks = np.empty(len(inputs))
        chances = np.empty((len(inputs), len(self.horizons)))
        owner = np.array(names or [client or ""] * len(inputs))
        for one in np.unique(owner):
            model, at = self.model(str(one) or None), owner == one
            risks[at] = inputs[at] @ np.array(model["coefficients"])
            chances[at] = survival_of(model, inputs[at], self.horizons)
        clients = None if names is None else tuple(names)
        return SurvivalPredictions(risks, chances, tuple(self.horizons), clients)

    def predict(self, source: Any, client: str | None = None) -> np.ndarray:
        """The risk of each row; ``predictions`` has survival, too."""
        return self.predictions(source, client).labels

    def model(self, client: str | None = None) -> dict[str, Any]:
        """The model of a client, or the shared one."""
        if client is None and self._shared is None:
            raise RunError(
                f"{self.folder}: no client sent anything, so there is no shared model; "
                "name a client, whose own model predicts"
            )
        if client is None:
            return self._shared
        names = [*self._models]
        if client not in names and client.isdecimal() and int(client) < len(names):
            client = names[int(client)]
        if client not in names:
            known = hint(client, names)
            raise RunError(f"client: {client!r} is not a client of this run; {known}")
        return self._models[client]
