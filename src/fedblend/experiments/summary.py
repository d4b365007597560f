# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``summary.json``: the end of a run; its presence means that all results are there."""

import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fedblend.config.build import Built
from fedblend.config.config import Config
from fedblend.config.model import loss_name
from fedblend.core import Batch, PyTree
from fedblend.data.federated import FederatedData
from fedblend.experiments import new_clients, results, run_folder
from fedblend.experiments.run_folder import Folder, seeds_of
from fedblend.gains import harms
from fedblend.metrics import Metric
from fedblend.simulation.run import Run


def write_summary(
    folder: Folder,
    config: Config,
    built: Built,
    run: Run,
    promised: dict[str, Any],
    on_warning: Callable[[str], None],
) -> dict[str, Any]:
    """Write all results of a completed run, the summary last.

    Args:
        folder: the folder of the run.
        config: what was run.
        built: what the configuration built.
        run: the federated stage, completed.
        promised: the privacy of the run.
        on_warning: called with each warning, one line.

    Returns:
        The content of ``summary.json``.
    """
    seeds = seeds_of(config)
    columns, about_clients, warnings = results.diagnostics(run, config.algorithm)
    warnings += results.warnings_at_end(run, loss_name(config, built.task), seeds)
    for warning in warnings:
        on_warning(warning)
    unseen = new_clients.unseen_clients(run, config, built) if built.unseen else []
    harm = results.write_results(folder, run, seeds, columns, unseen)
    if unseen:
        harm["unseen"] = {"harmed": harms(new_clients.evidence_of(unseen))}
    ends = [run.summary()] if run.replicas is None else run.summary()
    own_rows = _at_server(built.server, run_folder.models(run), built.measures)
    runs = [
        {"seed": seed, **end, **own}
        for seed, end, own in zip(seeds, ends, own_rows, strict=True)
    ]
    for one, new in zip(runs, unseen, strict=False):
        one["unseen"] = {"round": run.round, **new.summary()}
    summary = {
        "name": config.name,
        "algorithm": config.algorithm.name,
        **origin(built),
        "warnings": [*built.warnings, *warnings],
        **about_clients,
        **promised,
        **harm,
        "runs": runs,
    }
    run_folder.write_text(folder.summary, run_folder.as_json(summary))
    return run_folder.read_json(folder.summary)


def origin(built: Built) -> dict[str, Any]:
    """The versions, the device and the data of a run."""
    from fedblend import __version__

    return {
        "fedblend": __version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "data": built.facts,
    }


def _at_server(
    own: FederatedData | None, shared: list[PyTree], metrics: Mapping[str, Metric]
) -> list[dict[str, Any]]:
    """The metrics of each seed's shared model on the server's own rows."""
    if own is None:
        return [{}] * len(shared)
    splits = {"train": own.train, "test": own.test}
    batches = {
        name: Batch(jax.tree.map(np.asarray, split.rows(0)))
        for name, split in splits.items()
        if split is not None
    }
    return [
        {
            "central": {
                name: {
                    "rows": len(batch.rows[0]),
                    **{m: float(of(model, batch)) for m, of in metrics.items()},
                }
                for name, batch in batches.items()
            }
        }
        for model in shared
    ]
