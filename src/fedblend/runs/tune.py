# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Choose alpha for a configuration by cross-validation, guarded against harm.

``selection.choose`` with the local work, the rounds and the seed of the configuration,
and training alone as an arm; the configuration's own alpha is not used. The models that
clients deploy go to the folder of a run, as those of any other run.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config.build import Built, build, method
from fedblend.config.config import Config, rename_errors
from fedblend.config.tables import privacy
from fedblend.config.theory_rates import Rates, rates
from fedblend.core import Algorithm
from fedblend.errors import ConfigError, RunError
from fedblend.runs import results, run_folder
from fedblend.runs.run import open_folder
from fedblend.runs.run_folder import Folder, seeds_of
from fedblend.selection.arms import ALONE
from fedblend.selection.choose import Choice, choose_arms, deploy
from fedblend.theory.steps import scale_step
from fedblend.trees import precision


def tune_config(
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
    measure = config.measure.model_copy(update={"local": True})
    with precision(config.run.precision), warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", "choose: ", UserWarning)
        built = build(config.model_copy(update={"measure": measure}))
        spec = dataclasses.replace(
            built.spec,
            algorithm=alpha_builder(config, built),
            federated_data=built.federated_data,
        )
        by = by or next((name for name in spec.measure if name != "loss"), "loss")
        with rename_errors(by="--by", folds="--folds"):
            found = choose_arms(spec, built.local, [*alphas, 1.0], by=by, folds=folds)
    said = (str(one.message) for one in told)
    own = (line for line in said if line.startswith("choose: "))
    return found, built, (*built.warnings, *own)


def alpha_builder(config: Config, built: Built) -> Callable[[Any], Algorithm]:
    """From an alpha, which may be traced, to the algorithm of a configuration.

    ``rate = "theory"`` is the rate of that alpha, 1/L_alpha for gradient descent.
    """
    if config.algorithm.rate != "theory":
        return lambda alpha: rebuild(config, built, {"algorithm.alpha": alpha})
    whole = rates(set_alpha(config, 1.0), built.smoothness, built.parameters)

    def algorithm(alpha: Any) -> Algorithm:
        own = whole._replace(together=scale_step(whole.together, alpha))
        return rebuild(config, built, {"algorithm.alpha": alpha}, own)

    return algorithm


def rebuild(
    config: Config,
    built: Built,
    values: Mapping[str, Any],
    known: Rates | None = None,
) -> Algorithm:
    """The algorithm of a configuration with other values, which may be traced.

    Args:
        config: what to run.
        built: what it builds.
        values: in place of those of the configuration, by key.
        known: the rates of theory, if they are known.
    """
    clients, task = built.federated_data.clients, built.task
    found = method(
        config, task, clients, clients, built.smoothness, known, values=values
    )
    return found.algorithm


def check_alpha(config: Config) -> None:
    """Refuse a configuration without an alpha that can be chosen."""
    options: Any = config.algorithm
    if not options.mixes:
        raise ConfigError(
            f'algorithm.name: "{options.name}" mixes no models, there is no alpha to '
            "choose; flix, flix_local_steps and apfl have one"
        )
    if getattr(options, "learn", "fixed") != "fixed":
        raise ConfigError(
            f'algorithm.learn: is "{options.learn}", so alpha moves by itself; there '
            'is a choice among fixed ones, with algorithm.learn="fixed" of apfl'
        )
    if getattr(options, "grid", 0):
        raise ConfigError(
            f"algorithm.grid: is {options.grid}, so alpha is chosen while training; to "
            "choose among fixed ones set algorithm.grid=0"
        )
    if not isinstance(config.run.seed, int):
        raise ConfigError("run.seed: has several seeds, but a choice is made for one")
    if config.run.until is not None:
        raise ConfigError("run.until: alphas are compared after the same run.rounds")


def set_alpha(config: Config, alpha: Any) -> Config:
    """The same configuration with another alpha, or one for each client."""
    options = config.algorithm.model_copy(update={"alpha": alpha})
    return config.model_copy(update={"algorithm": options})


def mean_alphas(found: Choice) -> np.ndarray:
    """Every client's alpha, the mean by its weights; 0 if training alone is best."""
    own = np.array([name == ALONE for name in found.names])
    by_arm = np.array([0.0 if name == ALONE else float(name) for name in found.names])
    weights = np.where(own, 0.0, found.weights)
    means = weights @ by_arm / np.maximum(weights.sum(axis=1), 1e-12)
    return np.where(own[found.chosen], 0.0, means)


def models_folder(out: Path) -> Path:
    """The run folder of the models, beside the table of the choices.

    Raises:
        RunError: it or the table exists, or cannot be there.
    """
    folder = out.with_suffix("")
    if folder == out:
        raise RunError(f"{out}: is not a .csv file, to which the choices are written")
    for path in (out, folder):
        if path.exists():
            raise RunError(f"{path}: exists already; --out names another file")
    if not out.parent.is_dir():
        raise RunError(
            f"{out.parent}: is not a folder, where {out.name} could be written"
        )
    return folder


def write(config: Config, built: Built, found: Choice, out: Path) -> None:
    """Write every client's choice as CSV, and its model in the folder of a run.

    The configuration of the folder has every client's mean alpha, see ``mean_alphas``;
    a run of it comes near the models that are in the folder.
    """
    folder = Folder(models_folder(out))
    data, values = found.federated_data, {"folds": found.cross_validation}
    if found.test is not None:
        values["test"] = found.test
    columns: dict[str, Any] = {
        f"weight_of_{name}": of
        for name, of in zip(found.names, found.weights.T, strict=True)
    }
    columns |= {
        f"{split}_{found.metric}_at_{name}": of[arm]
        for split, of in values.items()
        for arm, name in enumerate(found.names)
    }
    alphas = mean_alphas(found).tolist()
    rows = [
        {
            "id": client,
            "name": data.name(client),
            "alpha": alpha,
            "arm": found.names[arm],
            "why": found.reasons[client],
            "expected_harm": float(found.harm[client]),
            "probability_best": float(found.decisions[client].best[arm]),
            **run_folder.cells(columns, columns, client),
        }
        for client, (alpha, arm) in enumerate(zip(alphas, found.chosen, strict=True))
    ]
    run_folder.write_table(out, rows)
    kept = config.run.model_copy(update={"keep_personal": "always"})
    again = set_alpha(config, alphas).model_copy(update={"run": kept})
    with precision(config.run.precision):
        run = deploy(found, built.spec)
        open_folder(folder, again, built)
        run_folder.write_metrics(folder, run, seeds_of(config))
        about = {"guard": {"expected_harm": float(found.harm.mean())}}
        results.write_summary(folder, again, built, run, about, lambda line: None)
