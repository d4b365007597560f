# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The harm report of a run: who gains by its personal model, who is harmed.

``harm.csv`` has a row for every client, the most harmed first, and ``figures/harm`` its
picture; with several seeds values are their means.
"""

import csv
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedblend.experiment.outputs import Folder, write_text
from fedblend.report.harm import Clients, Comparison, compared, harm_rows
from fedblend.report.series import Row, shown_metrics, shown_splits
from fedblend.runtime.run import Run


class Harm(NamedTuple):
    """A comparison of models, and the clients it is about."""

    found: Comparison
    clients: Clients


def harm_of(
    run: Run, rows: list[Row], columns: Mapping[str, np.ndarray]
) -> Harm | None:
    """Compare the models of a run, if there is another one than the personal.

    Args:
        run: a completed one.
        rows: its rows, see ``outputs.rows``.
        columns: facts of the measured clients; "alpha" is shown.
    """
    for split in shown_splits(rows)[:1]:
        metric = shown_metrics(rows, split)[0]
        found = compared(_mean_over_seeds(run, split, metric), split, metric)
        if found is not None:
            return Harm(found, _clients(run, split, columns.get("alpha")))
    return None


def _mean_over_seeds(run: Run, split: str, metric: str) -> Any:
    models = run.measured[0][split]
    return {
        split: {
            model: {
                metric: np.mean([of[split][model][metric] for of in run.measured], 0)
            }
            for model in models
        }
    }


def _clients(run: Run, split: str, alpha: np.ndarray | None) -> Clients:
    ids, federation = run.measuring.ids, run.federation
    if alpha is not None:
        alpha = np.asarray(alpha, np.float64).reshape(len(ids), -1).mean(axis=1)
    return Clients(
        ids=ids,
        names=[federation.name(int(client)) for client in ids],
        train=federation.train.counts[ids],
        test=federation.splits[split].counts[ids],
        alpha=alpha,
    )


def write_harm(folder: Folder, harm: Harm) -> None:
    """The table, the most harmed first."""
    rows = harm_rows(harm.found, harm.clients)
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(folder.harm, text.getvalue())
