# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Choose alpha for a configuration by cross-validation, guarded against harm.

``selection.choose`` with the local work, the rounds and the seed of the configuration,
and training alone as an arm; the configuration's own alpha is not used. The models that
clients deploy go to the folder of a run, as those of any other run.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config.build import Built, build
from fedblend.config.config import Config, named_by_key
from fedblend.config.tables import privacy
from fedblend.errors import RunError
from fedblend.runs import results, run_folder
from fedblend.runs.run import open_folder
from fedblend.runs.run_folder import Folder, seeds_of
from fedblend.runs.tune import by_alpha, check_alpha, check_out, with_alpha
from fedblend.selection.choose import Choice, choose_arms
from fedblend.selection.cross_validate import ALONE
from fedblend.selection.deploy_choice import deploy
from fedblend.trees import precision


def guard_config(
    config: Config, alphas: list[float], by: str | None = None, folds: int = 5
) -> tuple[Choice, Built, tuple[str, ...]]:
    """Cross-validate all alphas of a configuration.

    Args:
        config: what to run; its own alpha is not used.
        alphas: the grid; 1, the shared model, is one of its arms in any case.
        by: the metric that decides; the first besides the loss if None.
        folds: number of folds.

    Returns:
        The choices, what the configuration built, and warnings.

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
    return found, built, (*built.warnings, *own)


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


def folder_of(out: Path) -> Folder:
    """The folder of the models, beside the table of the choices."""
    return Folder(out.with_suffix(""))


def check_place(out: Path) -> None:
    """Refuse a place where the table, or anything called like the folder, exists."""
    check_out(out)
    path = folder_of(out).path
    if path == out:
        raise RunError(f"{out}: is the place of a table; --out FILE.csv names one")
    if path.exists():
        raise RunError(f"{path}: exists already; --out names another file")


def write(config: Config, built: Built, found: Choice, out: Path) -> None:
    """Write every client's choice as CSV, and its model in the folder of a run.

    The configuration of the folder has every client's mean alpha, see ``alphas_of``; a
    run of it comes near the models that are in the folder.
    """
    check_place(out)
    data, values = found.federated_data, {"folds": found.cross_validation}
    if found.test is not None:
        values["test"] = found.test
    columns: dict[str, Any] = {
        f"{split}_{found.metric}_at_{name}": of[arm]
        for split, of in values.items()
        for arm, name in enumerate(found.names)
    }
    alphas = alphas_of(found).tolist()
    weights = {
        f"weight_of_{name}": of
        for name, of in zip(found.names, found.weights.T, strict=True)
    }
    rows = [
        {
            "id": client,
            "name": data.name(client),
            "alpha": alpha,
            "chosen_on": "others" if found.reasons[client] == "no rows" else "folds",
            "arm": found.names[found.chosen[client]],
            "why": found.reasons[client],
            "expected_harm": float(found.harm[client]),
            "probability_best": float(
                found.decisions[client].best[found.chosen[client]]
            ),
            **run_folder.cells(weights | columns, weights | columns, client),
        }
        for client, alpha in enumerate(alphas)
    ]
    run_folder.write_table(out, rows)
    kept = config.run.model_copy(update={"keep_personal": "always"})
    again = with_alpha(config, alphas).model_copy(update={"run": kept})
    folder = folder_of(out)
    with precision(config.run.precision):
        run = deploy(found, built.spec)
        open_folder(folder, again, built)
        run_folder.write_metrics(folder, run, seeds_of(config))
        about = {"guard": {"expected_harm": float(found.harm.mean())}}
        results.write_summary(
            folder, again, built, run, about, lambda line: None, formats=()
        )
