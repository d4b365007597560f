# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Choose alpha for a configuration by cross-validation, guarded against harm.

``simulation.choose`` with the local work, the rounds and the seed of the configuration,
and training alone as an arm; the configuration's own alpha is not used.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config import privacy
from fedblend.config.build import build
from fedblend.config.config import Config, named_by_key
from fedblend.experiments import run_folder
from fedblend.experiments.tune import by_alpha, check_alpha, check_out, write_choices
from fedblend.simulation.choose import Choice, choose_arms
from fedblend.simulation.cross_validate import ALONE
from fedblend.trees import precision


def guard_config(
    config: Config, alphas: list[float], by: str | None = None, folds: int = 5
) -> tuple[Choice, tuple[str, ...]]:
    """Cross-validate all alphas of a configuration; the choices, and warnings.

    Args:
        config: what to run; its own alpha is not used.
        alphas: the grid; 1, the shared model, is one of its arms in any case.
        by: the metric that decides; the first besides the loss if None.
        folds: number of folds.

    Raises:
        ConfigError: there is no alpha to choose.
        DataError: the data cannot be had, or cannot be used.
    """
    check_alpha(config)
    privacy.refuse(config.privacy, "a choice by cross-validation is not private")
    with precision(config.run.precision), warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", "choose: ", UserWarning)
        built = build(_with_alone(config))
        spec = dataclasses.replace(
            built.spec,
            algorithm=by_alpha(config, built),
            federated_data=built.federated_data,
        )
        by = by or next((name for name in spec.measure if name != "loss"), "loss")
        with named_by_key(by="--by", folds="--folds"):
            found = choose_arms(spec, built.local, [*alphas, 1.0], by=by, folds=folds)
    said = (str(one.message) for one in told)
    own = (line for line in said if line.startswith("choose: "))
    return found, (*built.warnings, *own)


def _with_alone(config: Config) -> Config:
    """The same configuration, that compares with training alone."""
    measure = config.measure.model_copy(update={"local": True})
    return config.model_copy(update={"measure": measure})


def alphas_of(found: Choice) -> np.ndarray:
    """Every client's alpha, the mean by its weights; 0 if training alone is best."""
    own = np.array([name == ALONE for name in found.names])
    by_arm = np.array([0.0 if name == ALONE else float(name) for name in found.names])
    weights = np.where(own, 0.0, found.weights)
    means = weights @ by_arm / np.maximum(weights.sum(axis=1), 1e-12)
    return np.where(own[found.chosen], 0.0, means)


def write(config: Config, found: Choice, out: Path) -> None:
    """Write every client's choice as CSV, and the configuration with it as TOML."""
    check_out(out)
    data, values = found.federated_data, {"folds": found.cross_validation}
    if found.test is not None:
        values["test"] = found.test
    columns: dict[str, Any] = {
        f"{split}_{found.metric}_at_{name}": of[arm]
        for split, of in values.items()
        for arm, name in enumerate(found.names)
    }
    rows = [
        {
            "id": client,
            "name": data.name(client),
            "alpha": float(alpha),
            "chosen_on": "others" if found.reasons[client] == "no rows" else "folds",
            "arm": found.names[found.chosen[client]],
            "why": found.reasons[client],
            "expected_harm": float(found.decisions[client].harm[found.chosen[client]]),
            "probability_best": float(
                found.decisions[client].best[found.chosen[client]]
            ),
            **run_folder.cells(columns, columns, client),
        }
        for client, alpha in enumerate(alphas_of(found))
    ]
    write_choices(config, rows, out)
