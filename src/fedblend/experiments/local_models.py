# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How well clients found their own models, for the methods that look for them.

A pure local model that was not trained to the end is another model than the method is
about; every run says how large the clients' own gradients still are.
"""

from typing import Any

import jax
import numpy as np

from fedblend.simulation.run import Run

MOST_NAMED = 5
"""Clients whose names a warning holds."""


def gradient_norms(run: Run) -> np.ndarray | None:
    """The norm of each measured client's gradient at its own model, if it is known.

    With replicas they are the second axis.
    """
    norms = run.info(run.measured_ids).get("local_model_gradient_norm")
    return None if norms is None else np.asarray(norms)


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
    worst = norms.reshape(len(norms), -1).max(axis=1)  # over the replicas
    missed = 0 if tolerance is None else int((worst > tolerance).sum())
    found = {
        "mean_gradient_norm": float(norms.mean()),
        "worst_gradient_norm": float(norms.max()),
        "tolerance": tolerance,
        "clients_above_tolerance": missed,
    }
    warnings = []
    stuck = run.measured_ids[_untrained(run, norms, tolerance or 0.0)]
    found["clients_not_trained"] = len(stuck)
    if len(stuck):
        names = [run.federated_data.name(int(client)) for client in stuck[:MOST_NAMED]]
        more = ", ..." if len(stuck) > MOST_NAMED else ""
        warnings.append(
            f"the local models of {len(stuck)} clients ({', '.join(names)}{more}) were "
            "not trained and are the initial model, which no step made better; a "
            "smaller algorithm.personal.rate may help"
        )
    if missed:
        warnings.append(
            f"the local models of {missed} clients were not found to a gradient norm "
            f"of {tolerance:g} (the worst is at {norms.max():.2g}); "
            "algorithm.personal.most allows more steps"
        )
    return {"local_models": found}, warnings


def _untrained(run: Run, norms: np.ndarray, tolerance: float) -> np.ndarray:
    """Which clients' models are the start still, though it is no solution."""
    same = np.ones(norms.shape, bool)
    models = run.info(run.measured_ids)["local_model"]
    leaves = jax.tree.leaves(models), jax.tree.leaves(run.params)
    for leaf, first in zip(*leaves, strict=True):
        equal = np.asarray(leaf) == np.asarray(first)
        same &= equal.reshape(*norms.shape, -1).all(axis=-1)
    stuck = same & ~(norms <= tolerance)  # a norm that is not a number, too
    return np.asarray(stuck.reshape(len(norms), -1).any(axis=1))
