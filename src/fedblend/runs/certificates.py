# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What theory proves of a run: for ``summary.json``, and for ``run.until``.

**Certificates** are measured. They need mu_alpha, which is known of mixtures of linear
models with l2, or of least squares; see ``theory.bounds``. f~ has the weights of the
run.

**The bound of a run of FLIX with its own step.** Gradient descent on the mixture is
linear: ``f~(x^k) - min f~`` is at most ``(1 - mu_alpha/L_alpha)^k`` times that of
x_avg. A run finds local models to a gradient norm, not exactly. With ``g_i`` the
gradient of f_i at x_i that was found::

    f~(x_avg) - min f~ <= L_alpha V/2 + mean alpha_i |g_i| |x_avg - x_i|
                          + mean |g_i|^2/(2 mu_i)

because ``min f~ >= mean min f_i >= mean f_i(x_i) - |g_i|^2/(2 mu_i)``. Without g_i it
is Theorem 1. With theory's momentum at the server it is the bound of accelerated
descent.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from fedblend.config.build import Built
from fedblend.config.config import Config
from fedblend.config.theory_rates import asks_for_constants, require_known
from fedblend.errors import ConfigError
from fedblend.simulation.certify import certificates, until
from fedblend.simulation.run import Run
from fedblend.theory import bounds
from fedblend.theory.constants import mixture, stack_models
from fedblend.theory.steps import dgd


def strong_convexity(config: Config, built: Built) -> list[float]:
    """mu_alpha, one number or one for each seed with a split of its own.

    Raises:
        ConfigError: it is not known, and why.
    """
    options: Any = config.algorithm
    for given, why in (
        (not asks_for_constants(config), f"of {options.name}"),
        (getattr(options, "mix", "parameters") != "parameters", "of mixed outputs"),
        (config.central is not None, "of an objective with the server's loss"),
        (config.privacy is not None, "that may be told of a private run"),
        (config.populations is not None, "of weighted populations"),
    ):
        if given:
            raise ConfigError(f"run.until: there is no certificate {why}")
    known = require_known(built.smoothness, "run.until")
    clients = len(known.smooth)
    by_count = config.run.weights == "by_count"
    weights = built.federated_data.train.counts if by_count else np.ones(clients)
    every = [known]
    if built.by_split is not None:
        convex = np.asarray(built.by_split.over["convex"], float)
        every = [known._replace(convex=of) for of in convex]
    alpha = 1.0 if options.alpha is None else np.asarray(options.alpha, float)
    found = [bounds.mean_mu(alpha, one, weights) for one in every]
    if min(found) <= 0:
        raise ConfigError(
            "run.until: needs strong convexity, but mu_alpha is 0; model.l2 above 0 "
            "gives it"
        )
    return found


def blocks_of(config: Config, built: Built) -> Callable[[Run], Iterable[Any]]:
    """From a run to the blocks that it takes: all of them, or up to ``run.until``.

    Raises:
        ConfigError: there is no certificate to stop at.
    """
    eps = config.run.until
    if eps is None:
        return lambda run: run
    mu = strong_convexity(config, built)
    return lambda run: until(run, eps, built.loss, mu)


def run_certificates(config: Config, built: Built, run: Run) -> list[dict[str, Any]]:
    """The certificate of each seed for ``summary.json``; empty tables if unknown."""
    try:
        mu = strong_convexity(config, built)
    except ConfigError:
        return [{}] * (run.replicas or 1)
    each = np.broadcast_to(mu, (run.replicas or 1,)).tolist()
    found = certificates(run, built.loss, each)
    return [
        {"certificate": {**one._asdict(), "mu": own}}
        for one, own in zip(found, each, strict=True)
    ]


def promise(config: Config, built: Built, run: Run) -> dict[str, Any]:
    """The bound of the first seed, for ``summary.json``; empty where there is none.

    Returns:
        ``{"theory": {"start": s, "factor": q}}``: after k rounds the training
        objective is at most ``s q^k`` above its smallest value.
    """
    options: Any = config.algorithm
    known = built.smoothness
    if options.entry.theory is not dgd or options.rate != "theory" or config.compress:
        return {}
    if known is None or known.convex.min() <= 0:
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
        start *= bounds.acceleration_excess(constants)
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
    return stack_models(models).astype(np.float64), norms.astype(np.float64)
