# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run that Python code set up: what ``Run.save`` writes.

It has the files of any other run. What only a configuration can say is left out:
``config.toml`` has the name, the algorithm, the rounds and the seeds, and says in
``made_by`` that there is no more. Seeds are the numbers of the keys: 0, 1, ...
"""

from pathlib import Path
from typing import Any

import jax

from fedblend.config import toml
from fedblend.data.dataset import digest
from fedblend.errors import RunError, UserError
from fedblend.report.page import write_page
from fedblend.runs import results, run_folder
from fedblend.runs.run_folder import MADE_BY, Folder
from fedblend.simulation.run import Run


def save(run: Run, path: str | Path, name: str | None = None) -> Path:
    """Write the folder of a run; it takes the place of one that code wrote there.

    Args:
        run: completed here if it is not.
        path: the folder.
        name: of the run; that of its algorithm if None.

    Raises:
        RunError: the folder holds the run of a configuration.
    """
    if run.over is not None and run.replicas is not None:
        allowed = "a run of one value; run.select_replicas(0).save(folder) writes one"
        raise UserError("save", run, allowed, "a sweep")
    folder = Folder(Path(path))
    if folder.config.is_file() and run_folder.read_made_by(folder) is None:
        raise RunError(f"{path}: holds the run of a configuration; name another folder")
    run.complete()
    seeds = list(range(run.replicas or 1))
    runs = results.ends(run, seeds)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.summary.unlink(missing_ok=True)
    folder.harm.unlink(missing_ok=True)
    algorithm, known = run.name, results.versions()
    about = {
        "name": name or algorithm,
        "made_by": MADE_BY,
        "algorithm": {"name": algorithm},
        "run": {"rounds": run.rounds, "seed": 0 if run.replicas is None else seeds},
    }
    run_folder.write_text(folder.config, toml.write(about))
    known["data"] = data_facts(run)
    run_folder.write_text(folder.origin, run_folder.json_text(known))
    run_folder.write_metrics(folder, run, seeds)
    columns, of_clients, warnings = results.diagnostics(run, None)
    harmed = results.write_results(folder, run, seeds, columns)
    kept, large = run_folder.write_personal_models(
        folder, run, seeds, run.algorithm, "auto"
    )
    warnings += results.warnings_at_end(run, runs, None) + large
    summary = {"name": about["name"], "algorithm": algorithm, **known, **of_clients}
    summary |= {"warnings": warnings, **harmed, "personal_models": kept, "runs": runs}
    run_folder.write_text(folder.summary, run_folder.json_text(summary))
    return folder.path


def data_facts(run: Run) -> dict[str, Any]:
    """What runs that are compared must share: the rows of all clients, and the keys."""
    arrays: list[Any] = []
    for split in run.federated_data.splits.values():
        arrays += [*jax.tree.leaves(split.examples), split.starts, split.counts]
    return {
        "rows_sha256": digest(arrays),
        "keys": jax.random.key_data(run.key).tolist(),
    }


def report(run: Run, path: str | Path) -> Path:
    """Write a run as one HTML page; its folder is beside it, with the same name."""
    page = Path(path)
    if not page.suffix:
        raise UserError("report", str(path), "the name of an HTML file")
    return write_page([save(run, page.with_suffix(""))], page)
