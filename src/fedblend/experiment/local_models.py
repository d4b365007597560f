# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How well clients found their own models, for the methods that look for them.

A pure local model that was not trained to the end is another model than the method is
about; every run says how large the clients' own gradients still are.
"""

from typing import Any

import jax
import numpy as np

from fedblend.runtime.run import Run


def gradient_norms(run: Run) -> np.ndarray | None:
    """The norm of each measured client's gradient at its own model, if it is known.

    With lanes they are the second axis.
    """
    states = run.store.gather(run.measuring.ids)
    for path, leaf in jax.tree_util.tree_leaves_with_path(states):
        if jax.tree_util.keystr(path).endswith(".norm"):
            return np.asarray(leaf)
    return None


def columns(run: Run) -> dict[str, np.ndarray]:
    """What the table of clients says of local models."""
    norms = gradient_norms(run)
    return {} if norms is None else {"local_model_gradient_norm": norms}


def report(run: Run, options: Any) -> tuple[dict[str, Any], list[str]]:
    """What a summary says of local models, and what a user is warned of."""
    norms = gradient_norms(run)
    if norms is None:
        return {}, []
    tolerance = getattr(getattr(options, "personal", None), "tolerance", None)
    worst = norms.reshape(len(norms), -1).max(axis=1)  # over the lanes
    missed = 0 if tolerance is None else int((worst > tolerance).sum())
    found = {
        "mean_gradient_norm": float(norms.mean()),
        "worst_gradient_norm": float(norms.max()),
        "tolerance": tolerance,
        "clients_above_tolerance": missed,
    }
    warnings = []
    if missed:
        warnings.append(
            f"the local models of {missed} clients were not found to a gradient norm "
            f"of {tolerance:g} (the worst is at {norms.max():.2g}); "
            "algorithm.personal.most allows more steps"
        )
    return {"local_models": found}, warnings
