# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates of a run: for ``summary.json``, and for ``run.until``.

They are measured, and need mu_alpha, which is known of mixtures of linear
models with l2, or of least squares; see ``theory.bounds``. f~ has the weights of the
run.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fedblend.config.build import Built
from fedblend.config.config import Config
from fedblend.config.theory_rates import asks_for_constants, require_known
from fedblend.errors import ConfigError
from fedblend.simulation.certify import certificates, until
from fedblend.simulation.run import Run
from fedblend.theory import bounds


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
