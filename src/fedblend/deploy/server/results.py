# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The results of a federation, in the files of a simulated run."""

from typing import Any

import numpy as np

from fedblend.config import privacy
from fedblend.deploy.contract import Contract
from fedblend.deploy.server.coordinator import Coordinator
from fedblend.experiments import harm, run_folder
from fedblend.experiments.run_folder import Folder
from fedblend.report.harm import plot_harm, sentence
from fedblend.simulation.result import harms


def write_results(
    folder: Folder, contract: Contract, server: Coordinator, repeated: int
) -> dict[str, Any]:
    """Write models, clients, harm and figures, and the summary last.

    Args:
        folder: of the run.
        contract: of the experiment.
        server: at its end.
        repeated: rounds that may have been counted twice; they cost privacy.

    Returns:
        The summary.
    """
    from fedblend.report.figures import plot_rows

    config, seeds, alone = contract.config, [contract.seed], server.alone
    run: Any = server
    run_folder.write_models(folder, run, seeds)
    rows = run_folder.rows(run, seeds)
    harmed = harm.harm_of(run, rows, {}) if server.measured[0] else None
    columns = harm.columns(run, harmed and harmed.found)
    if alone is not None and alone["rounds"] is not None:
        columns["local_rounds"] = np.full(contract.clients, alone["rounds"])
    run_folder.write_clients(folder, run, seeds, columns)
    if server.measured[0]:
        plot_rows(rows, folder.figures, server.evidence, alone)
    if harmed is not None:
        harm.write_harm(folder, harmed)
        plot_harm(*harmed, folder.figures / "harm", alone)
    rounds = config.run.rounds + repeated
    spent = config.model_copy(
        update={"run": config.run.model_copy(update={"rounds": rounds})}
    )
    summary = {
        "name": config.name,
        "algorithm": getattr(config.algorithm, "name"),  # noqa: B009
        **privacy.report(spent, contract.clients),
        **({} if harmed is None else {"harm": sentence(harmed.found, alone)}),
        "harmed": harms(server.evidence),
        "runs": [{"seed": contract.seed, **server.summary()}],
    }
    run_folder.write_text(folder.summary, run_folder.as_json(summary))
    return run_folder.read_json(folder.summary)
