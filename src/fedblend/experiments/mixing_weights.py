# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which mixing weights clients came to, for the methods that learn them.

A weight that is chosen on the rows to which the personal model is fitted says how well
that model fits, not what it is worth on other rows; a run says so.
"""

from typing import Any

import numpy as np

from fedblend.simulation.run import Run


def learned(run: Run) -> np.ndarray | None:
    """Every measured client's alpha, where the algorithm shows one.

    With replicas they are the second axis.
    """
    alphas = run.info(run.measured_ids).get("alpha")
    return None if alphas is None else np.asarray(alphas)


def columns(run: Run) -> dict[str, np.ndarray]:
    """What the table of clients says of mixing weights."""
    alphas = learned(run)
    return {} if alphas is None else {"alpha": alphas}


def report(run: Run, options: Any) -> tuple[dict[str, Any], list[str]]:
    """What a summary says of mixing weights, and what a user is warned of."""
    alphas = learned(run)
    if alphas is None:
        return {}, []
    found = {
        "mean": float(alphas.mean()),
        "smallest": float(alphas.min()),
        "largest": float(alphas.max()),
    }
    return {"alpha": found}, _doubts(run, options)


def _doubts(run: Run, options: Any) -> list[str]:
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
