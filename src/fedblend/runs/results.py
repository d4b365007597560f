# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The results of a completed run: its summary, tables and warnings.

Diagnostics tell what clients ended with: the gradient at the local models that FLIX
looks for, and the mixing weights that APFL learns. Warnings name what a user should not
overlook, such as a loss worse than that of the best constant prediction.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

import fedblend as fb
from fedblend.config.build import Built
from fedblend.config.config import Config
from fedblend.config.tables.model import loss_name, name_parts
from fedblend.report import measures
from fedblend.report.measures import rows_of
from fedblend.runs import per_row_scores, run_folder
from fedblend.runs.certificates import run_certificates
from fedblend.runs.personalize import new_clients
from fedblend.runs.run_folder import Folder, seeds_of
from fedblend.simulation.personalize import NewClients
from fedblend.simulation.result import Results, still_improving
from fedblend.simulation.run import Run
from fedblend.stats.constant_baseline import chance, worse_than_chance
from fedblend.stats.gains import Evidence, harms

MOST_NAMED = 5
"""Clients whose names a warning holds."""
COLUMNS = ("local_model_gradient_norm", "alpha")
"""The diagnostics of an algorithm that are columns of ``clients.csv``."""


def write_summary(
    folder: Folder,
    config: Config,
    built: Built,
    run: Run,
    promised: dict[str, Any],
    on_warning: Callable[[str], None],
) -> dict[str, Any]:
    """Write all results of a completed run; ``summary.json`` last, which ends a run.

    Args:
        folder: the folder of the run.
        config: what was run.
        built: what the configuration built.
        run: the federated stage, completed.
        promised: what is promised of the run: its privacy.
        on_warning: called with each warning, one line.

    Returns:
        The content of ``summary.json``.
    """
    seeds = seeds_of(config)
    runs = ends(run, seeds)
    columns, about_clients, warnings = diagnostics(run, config.algorithm)
    least = chance(loss_name(config, built.task), run.federated_data)
    warnings += warnings_at_end(run, runs, least)
    unseen = _unseen_clients(run, config, built)
    harmed = write_results(folder, run, seeds, columns, unseen)
    kept, size = run_folder.write_personal_models(
        folder, run, seeds, built.algorithm, config.run.keep_personal
    )
    warnings += size
    for one, model in zip(runs, run_folder.models(run), strict=True):
        one |= _server_metrics(built, model)
    for one, proven in zip(runs, run_certificates(config, built, run), strict=True):
        one |= proven
    for one, new in zip(runs, unseen, strict=False):
        one["unseen"] = {"round": run.round, **new.summary()}
    if unseen:
        harmed["unseen"] = {"harmed": harms(_together(unseen))}
    for warning in warnings:
        on_warning(warning)
    summary = {
        "name": config.name,
        "algorithm": config.algorithm.name,
        **origin(built),
        "warnings": [*built.warnings, *warnings],
        **about_clients,
        **promised,
        **harmed,
        "personal_models": kept,
        "runs": runs,
    }
    run_folder.write_text(folder.summary, run_folder.json_text(summary))
    return run_folder.read_json(folder.summary)


def ends(run: Run, seeds: list[int]) -> list[dict[str, Any]]:
    """The summary of every seed."""
    found = [run.summary()] if run.replicas is None else run.summary()
    return [{"seed": seed, **end} for seed, end in zip(seeds, found, strict=True)]


def origin(built: Built) -> dict[str, Any]:
    """The versions, the device and the data of a run."""
    return {**versions(), "data": built.facts}


def versions() -> dict[str, Any]:
    """The versions and the device of a run."""
    return {
        "fedblend": fb.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def _unseen_clients(run: Run, config: Config, built: Built) -> list[NewClients]:
    """The clients that ``data.unseen`` sets apart, for each seed."""
    if not built.unseen:
        return []
    personalize = partial(
        new_clients,
        name_parts(config, built.model, built.task),
        (loss_name(config, built.task), built.loss),
        measure=built.measures,
        splits=config.measure.splits,
    )
    models = run_folder.models(run)
    # Seeds that share a split share its clients.
    data = [*built.unseen] * (len(models) // len(built.unseen))
    keys = [run.key] if run.replicas is None else list(run.key)
    return list(map(personalize, data, models, keys))


def _together(found: Sequence[NewClients]) -> Evidence:
    """The evidence of all seeds together."""
    first, *_ = every = [one.evidence for one in found]
    return first._replace(
        measured=[one.measured for one in found],
        by_row=[one.by_row for one in found],
        numbers={
            split: np.concatenate([one.numbers[split] for one in every])
            for split in first.numbers
        },
    )


def _server_metrics(built: Built, model: Any) -> dict[str, Any]:
    """The metrics of a shared model on the server's own rows, where it has some."""
    if built.server is None:
        return {}
    found = {}
    for name, split in built.server.splits.items():
        batch = fb.Batch(jax.tree.map(np.asarray, split.rows(0)))
        values = {key: float(of(model, batch)) for key, of in built.measures.items()}
        found[name] = {"rows": len(batch.rows[0]), **values}
    return {"central": found}


def write_results(
    folder: Folder,
    run: Results,
    seeds: list[int],
    columns: dict[str, np.ndarray],
    unseen: Sequence[NewClients] = (),
) -> dict[str, Any]:
    """Write the models, the evidence, ``clients.csv`` and ``harm.csv``.

    Args:
        folder: the folder of the run.
        run: a completed run.
        seeds: the seed of each replica.
        columns: further columns of ``clients.csv``, see ``run_folder.write_clients``.
        unseen: the clients that took no part in training, for each seed.

    Returns:
        The harmed clients, for ``summary.json``.
    """
    rows = rows_of(run, seeds)
    run_folder.write_models(folder, run, seeds)
    per_row_scores.write(folder, run.evidence, run.measured_ids, seeds)
    if run.alone is not None and run.alone["rounds"] is not None:
        shape = (len(run.measured_ids), len(seeds))[: 1 if run.replicas is None else 2]
        columns = {**columns, "local_rounds": np.full(shape, run.alone["rounds"])}
    found = measures.compare_run(run, rows, columns.get("alpha"))
    if found is not None:
        run_folder.write_table(folder.harm, measures.harm_rows(*found))
    run_folder.write_clients(folder, run, seeds, columns, unseen)
    return {"harmed": harms(run.evidence)}


def diagnostics(
    run: Run, options: Any
) -> tuple[dict[str, np.ndarray], dict[str, Any], list[str]]:
    """What the algorithm shows of its clients.

    Args:
        run: a completed run.
        options: the options of its algorithm.

    Returns:
        Columns of ``clients.csv``, keys of ``summary.json``, and warnings.
    """
    info = run.info(run.measured_ids)
    columns = {name: np.asarray(info[name]) for name in COLUMNS if name in info}
    summary, warnings = {}, []
    if "local_model" in info:
        summary["local_models"], warnings = _local_models(run, info, options)
    if "alpha" in info:
        summary["alpha"] = {
            "mean": float(columns["alpha"].mean()),
            "smallest": float(columns["alpha"].min()),
            "largest": float(columns["alpha"].max()),
        }
        warnings = [*warnings, *_warnings_of_alpha(run, options)]
    return columns, summary, warnings


def _local_models(
    run: Run, info: Mapping[str, Any], options: Any
) -> tuple[dict[str, Any], list[str]]:
    """How close the local models are to their minimizers, and warnings."""
    models, norms = info["local_model"], np.asarray(info["local_model_gradient_norm"])
    tolerance = getattr(getattr(options, "personal", None), "tolerance", None)
    worst = norms.reshape(len(norms), -1).max(axis=1)  # over the seeds
    missed = 0 if tolerance is None else int((worst > tolerance).sum())
    same = np.ones(norms.shape, bool)
    pairs = zip(jax.tree.leaves(models), jax.tree.leaves(run.params), strict=True)
    for leaf, first in pairs:
        equal = np.asarray(leaf) == np.asarray(first)
        same &= equal.reshape(*norms.shape, -1).all(axis=-1)
    untrained = same & ~(norms <= (tolerance or 0.0))  # a norm of NaN, too
    stuck = run.measured_ids[untrained.reshape(len(norms), -1).any(axis=1)]
    warnings = []
    if len(stuck):
        names = [run.federated_data.name(int(client)) for client in stuck[:MOST_NAMED]]
        more = ", ..." if len(stuck) > MOST_NAMED else ""
        warnings.append(
            f"the local models of {len(stuck)} clients ({', '.join(names)}{more}) are "
            "still the initial model, because no step made it better; a smaller "
            "algorithm.personal.rate may help"
        )
    if missed:
        warnings.append(
            f"the local models of {missed} clients were not found to a gradient norm "
            f"of {tolerance:g} (the worst is at {norms.max():.2g}); "
            "algorithm.personal.most allows more steps"
        )
    return {
        "mean_gradient_norm": float(norms.mean()),
        "worst_gradient_norm": float(norms.max()),
        "tolerance": tolerance,
        "clients_above_tolerance": missed,
        "clients_not_trained": len(stuck),
    }, warnings


def _warnings_of_alpha(run: Run, options: Any) -> list[str]:
    """Where the rows that alpha was learned on cannot tell what generalizes."""
    if getattr(options, "learn", "fixed") == "fixed":
        return []
    fraction = getattr(options, "held_out", 0.0)
    if not fraction:
        return [
            "alpha was learned on the training rows that the personal models are "
            "fitted to, which cannot tell what generalizes; apfl takes held_out = 0.2"
        ]
    # In the precision in which ``data.batches.part`` counts them.
    counts = run.federated_data.train.counts.astype(np.float32)
    few = int((np.floor(np.float32(fraction) * counts) == 0).sum())
    if not few:
        return []
    return [
        f"{few} of {len(counts)} clients have too few training rows to hold out "
        f"{fraction:g} of them; their alpha stayed where it was"
    ]


def warnings_at_end(
    run: Results, runs: Sequence[Mapping[str, Any]], chance: float | None
) -> list[str]:
    """What is odd about a completed run; ``runs`` are the summaries of its seeds."""
    of_all = still_improving(run.alone)
    lines = [*of_all]
    for one in runs:
        start = f"seed {one['seed']}: " if len(runs) > 1 else ""
        own = [line for line in one["warnings"] if line not in of_all]
        lines += [f"{start}{line}" for line in own]
    return [*lines, *worse_than_chance(run.results, chance)]
