# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What theory promises of a run of FLIX with its own step, for the report of the run.

Gradient descent on the mixture is linear: ``f~(x^k) - min f~`` is at most
``(1 - mu_alpha/L_alpha)^k`` times that of x_avg (see ``theory.bounds``). A run finds
local models to a gradient norm, not exactly. With ``g_i`` the gradient of f_i at x_i
that was found::

    f~(x_avg) - min f~ <= L_alpha V/2 + mean alpha_i |g_i| |x_avg - x_i|
                          + mean |g_i|^2/(2 mu_i)

because ``min f~ >= mean min f_i >= mean f_i(x_i) - |g_i|^2/(2 mu_i)``. Without g_i it
is Theorem 1. With theory's momentum at the server it is the bound of accelerated
descent.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedblend.config.build import Built
from fedblend.config.config import Config
from fedblend.simulation.run import Run
from fedblend.theory import bounds
from fedblend.theory.constants import mixture, stacked


def promise(config: Config, built: Built, run: Run) -> dict[str, Any]:
    """The bound of the first seed, for ``summary.json``; empty where there is none.

    Returns:
        ``{"theory": {"start": s, "factor": q}}``: after k rounds the training
        objective is at most ``s q^k`` above its smallest value.
    """
    options: Any = config.algorithm
    known = built.smoothness
    if options.name != "flix" or options.rate != "theory" or config.compress:
        return {}
    if known is None or not known.certain or known.convex.min() <= 0:
        return {}
    if len(run.measured_ids) != len(known.smooth):
        return {}
    models, norms = _first_seed(run.info(run.measured_ids), run.replicas)
    constants = mixture(options.alpha, known, models)
    apart = np.linalg.norm(models - constants.average, axis=1)
    start = (
        bounds.one_shot(constants)
        + float(np.mean(constants.alpha * norms * apart))
        + float(np.mean(norms**2 / (2 * known.convex)))
    )
    factor = bounds.dgd(constants).factor
    if options.server:
        factor = bounds.accelerated(constants).factor
        start *= bounds.accelerated_excess(constants)
    if not np.isfinite(start):
        return {}
    return {"theory": {"start": start, "factor": factor}}


def _first_seed(
    info: Mapping[str, Any], replicas: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The local models, [clients, parameters], and their gradient norms."""
    models, norms = info["local_model"], np.asarray(info["local_model_gradient_norm"])
    if replicas is not None:
        models = jax.tree.map(lambda leaf: np.asarray(leaf)[:, 0], models)
        norms = norms[:, 0]
    return stacked(models).astype(np.float64), norms.astype(np.float64)
