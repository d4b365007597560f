# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Choose alpha for a configuration: the sweep, its table, and what to run next.

The sweep is ``selection.tune_alpha`` with the local work, the rounds and the seed of
the configuration; the configuration's own alpha is not used. ``rate = "theory"`` is
that of every alpha.
"""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from fedblend import trees
from fedblend.config.build import Built, build, method
from fedblend.config.config import Config, dump, named_by_key
from fedblend.config.tables import privacy
from fedblend.config.theory_rates import Rates, rates
from fedblend.core import Algorithm
from fedblend.errors import ConfigError, RunError
from fedblend.runs import run_folder
from fedblend.selection.tune_alpha import Tuned, choose_alpha
from fedblend.theory.steps import at_alpha
from fedblend.trees import precision


def tune_config(
    config: Config, alphas: list[float], by: str | None = None
) -> tuple[Tuned, tuple[str, ...]]:
    """Try all alphas for a configuration; the results, and warnings.

    Args:
        config: what to run; its own alpha is not used.
        alphas: the grid.
        by: the metric that decides, the first of the configuration if None.

    Raises:
        ConfigError: there is no alpha to choose, or nothing to choose it on.
        DataError: the data cannot be had, or cannot be used.
    """
    check_alpha(config)
    if not config.data.validation:
        raise ConfigError(
            "data.validation: is 0, and alpha is chosen on validation rows; set "
            "data.validation=0.2, or cross-validate the training rows with --guard"
        )
    privacy.refuse(config.privacy, "a choice on validation rows is not private")
    with precision(config.run.precision):
        built = build(config)
        held = built.federated_data.validation
        if held is None or not held.total:
            raise ConfigError(
                f"data.validation: {config.data.validation:g} leaves no client a row "
                "to choose on"
            )
        with named_by_key(by="--by"), warnings.catch_warnings():
            # ``found.warnings`` has them.
            warnings.filterwarnings("ignore", "tune: ", UserWarning)
            spec = dataclasses.replace(
                built.spec,
                algorithm=by_alpha(config, built),
                federated_data=built.federated_data,
                every=None,
            )
            found = choose_alpha(spec, alphas, by)
    return found, (*built.warnings, *found.warnings)


def by_alpha(config: Config, built: Built) -> Callable[[Any], Algorithm]:
    """From an alpha, which may be traced, to the algorithm of a configuration.

    ``rate = "theory"`` is the rate of that alpha, 1/L_alpha for gradient descent.
    """
    if config.algorithm.rate != "theory":
        return lambda alpha: rebuilt(with_alpha(config, alpha), built)
    dim = trees.size(jax.eval_shape(built.model.init, jax.random.key(0)))
    whole = rates(with_alpha(config, 1.0), built.smoothness, dim)

    def algorithm(alpha: Any) -> Algorithm:
        own = whole._replace(together=at_alpha(whole.together, alpha))
        return rebuilt(with_alpha(config, alpha), built, own)

    return algorithm


def rebuilt(config: Config, built: Built, known: Rates | None = None) -> Algorithm:
    """The algorithm of a changed configuration, whose numbers may be traced."""
    clients = built.federated_data.clients
    found = method(config, built.task, clients, clients, built.smoothness, known)
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
        raise ConfigError("run.seed: several; a choice is made for one seed")
    if config.run.until is not None:
        raise ConfigError("run.until: alphas are compared after the same run.rounds")


def check_out(out: Path) -> None:
    """Refuse a place for the table where it or the configuration beside it exists."""
    if out.suffix == ".toml":
        raise RunError(
            f"{out}: is the place of a table, .csv; --out names another file"
        )
    for path in (out, out.with_suffix(".toml")):
        if path.exists():
            raise RunError(f"{path}: exists already; --out names another file")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent}: is no folder to write {out.name} to")


def write(config: Config, found: Tuned, out: Path) -> None:
    """Write every client's choice as CSV, and the configuration with it as TOML."""
    check_out(out)
    data, splits = found.run.federated_data, {"validation": found.validation}
    if found.test is not None:
        splits["test"] = found.test
    columns = {
        f"{split}_{found.metric}_at_{alpha}": values[replica]
        for split, values in splits.items()
        for replica, alpha in enumerate(found.alphas)
    }
    rows = [
        {
            "id": client,
            "name": data.name(client),
            "alpha": float(found.chosen[client]),
            "chosen_on": "others" if found.unsure[client] else "validation",
            **run_folder.cells(columns, columns, client),
        }
        for client in range(data.clients)
    ]
    run_folder.write_table(out, rows)
    again = with_alpha(config, [row["alpha"] for row in rows])
    run_folder.write_text(out.with_suffix(".toml"), dump(again))


def with_alpha(config: Config, alpha: Any) -> Config:
    """The same configuration with another alpha, or one for each client."""
    options = config.algorithm.model_copy(update={"alpha": alpha})
    return config.model_copy(update={"algorithm": options})
