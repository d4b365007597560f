# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The harm report of a run: who gains by its personal model, who is harmed.

``harm.csv`` has a row for every client, the most harmed first, and ``figures/harm`` its
picture; with several seeds values are their means, and intervals hold for these.
"""

import csv
import io
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedblend.experiments.run_folder import Folder, write_text
from fedblend.report.harm import Clients, Comparison, compared, harm_rows
from fedblend.report.series import Row, shown_metrics, shown_splits
from fedblend.simulation.result import Results


class Harm(NamedTuple):
    """A comparison of models, and the clients it is about."""

    found: Comparison
    clients: Clients


def harm_of(
    run: Results, rows: list[Row], columns: Mapping[str, np.ndarray]
) -> Harm | None:
    """Compare the models of a run, if there is another one than the personal.

    Args:
        run: a completed one.
        rows: its rows, see ``outputs.rows``.
        columns: facts of the measured clients; "alpha" is shown.
    """
    for split in shown_splits(rows)[:1]:
        metric = shown_metrics(rows, split)[0]
        found = compared(run.evidence, split, metric)
        if found is not None:
            return Harm(found, _clients(run, split, columns.get("alpha")))
    return None


def columns(run: Results, found: Comparison | None) -> dict[str, np.ndarray]:
    """The interval of every client's gain and whether it is harmed, seed by seed.

    As ``outputs.write_clients`` takes them: over clients, and over seeds if several.
    """
    if found is None:
        return {}
    first = next(iter(found.gains))
    gains = [
        run.evidence.of_replica(replica).gain(found.split, found.metric, first)
        for replica in range(len(run.evidence.measured))
    ]
    known = [~np.isnan(gain.value) | gain.not_finite for gain in gains]
    harmed = [
        np.where(there, gain.harmed | gain.not_finite, np.nan)
        for gain, there in zip(gains, known, strict=True)
    ]
    by_name = {
        "gain_low": [gain.low for gain in gains],
        "gain_high": [gain.high for gain in gains],
        "harmed": harmed,
    }
    return {
        name: of[0] if run.replicas is None else np.stack(of, axis=1)
        for name, of in by_name.items()
    }


def _clients(run: Results, split: str, alpha: np.ndarray | None) -> Clients:
    ids, federated_data = run.measured_ids, run.federated_data
    if alpha is not None:
        alpha = np.asarray(alpha, np.float64).reshape(len(ids), -1).mean(axis=1)
    return Clients(
        ids=ids,
        names=[federated_data.name(int(client)) for client in ids],
        train=federated_data.train.counts[ids],
        test=federated_data.splits[split].counts[ids],
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
