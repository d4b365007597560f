# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What plans for a configuration of FLIX need: its constants, x_i, and a start.

All in float64. The start of every bound is measured, ``f~(x_avg) - mean f_i(x_i)``: no
minimum of f~ is below the mean of the minima of f_i.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.config import theory_rates
from fedblend.config.build import Built, build
from fedblend.config.config import Config
from fedblend.core import Key, PyTree
from fedblend.data.variants import one_class_clients
from fedblend.errors import ConfigError
from fedblend.registry import ALGORITHMS
from fedblend.simulation.certify import mixture_gap
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import simulate
from fedblend.theory import bounds
from fedblend.theory.constants import (
    MixtureConstants,
    Smoothness,
    mixture,
    stack_models,
)
from fedblend.theory.steps import dgd
from fedblend.trees import precision

TOLERANCE, PATIENCE = 1e-9, 10
"""The gradient norm to which x_i are solved, and by how many times more steps."""
ENOUGH = 1e-6
"""The largest gradient norm of an x_i that passes as a minimizer."""


class Problem(NamedTuple):
    """The constants and local models that plans for a configuration need."""

    config: Config
    built: Built
    """What the configuration builds without its table ``[compress]``."""
    params: PyTree
    """Initial parameters."""
    smoothness: Smoothness
    personal: np.ndarray
    """x_i, a row for every client."""
    gradient_norm: float
    """The largest norm of a gradient of f_i at x_i."""
    shape: np.ndarray
    """alpha_i in units of the largest."""
    gap: Callable[[np.ndarray, np.ndarray], float]
    """From alpha_i and x_avg to a bound on ``f~(x_avg) - min f~``, measured."""

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.shape)

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return self.personal.shape[1]

    def constants(self, alpha: float) -> MixtureConstants:
        """The constants of f~ for this alpha, of the client with the largest."""
        return mixture(alpha * self.shape, self.smoothness, self.personal)

    def start_constants(self, alpha: float) -> MixtureConstants:
        """The same with the V of a measured start; see ``bounds.start_at_gap``."""
        known = self.constants(alpha)
        return bounds.start_at_gap(known, self.gap(known.alpha, known.average))


def problem(config: Config) -> Problem:
    """Build the configuration, and solve for x_i in float64.

    Raises:
        ConfigError: theory has nothing to say about the configuration.
        DataError: the data cannot be had, or cannot be used.
    """
    options: Any = config.algorithm
    if options.entry.theory is not dgd:
        known = next(name for name, one in ALGORITHMS.items() if one.theory is dgd)
        line = f'algorithm.name: "{options.name}" has no plan, only "{known}"'
        raise ConfigError(line)
    own = options.personal
    if own.solver == "sgd":
        raise ConfigError(
            'algorithm.personal.solver: "sgd" does not minimize f_i, which plans need; '
            "lbfgs, newton and gradient_descent do"
        )
    _check_transforms(config)
    theory_rates.require_assumptions(config)
    patient = {"tolerance": TOLERANCE, "most": PATIENCE * own.most}
    own = own.model_copy(update=patient)
    exact = config.model_copy(
        update={
            "compress": None,
            "algorithm": options.model_copy(update={"personal": own}),
            "run": config.run.model_copy(update={"precision": "float64"}),
        }
    )
    with precision("float64"):
        built = build(exact)
        clients = built.federated_data.clients
        theory_rates.require_assumptions(config, clients)
        known = theory_rates.require_known(built.smoothness, "plan")
        shape = _shape(options.alpha, clients)
        _check_convex(built, known, shape)
        models, norms = _local_models(built)
        # Refuses rates of memories that are too fast.
        theory_rates.solver(config.compress, models.shape[1], clients)
        params = jax.device_get(built.model.init(built.key))
        gap = _gap_bound(built, params, models, norms, known)
    return Problem(config, built, params, known, models, float(norms.max()), shape, gap)


def start_run(built: Built, algorithm: Any, params: Any, **options: Any) -> Run:
    """A run, with the first of the seeds and of no rounds unless told otherwise."""
    options = {"rounds": 0, "key": first_key(built), **options}
    return simulate(algorithm, params, built.federated_data, **options)


def first_key(built: Built) -> Key:
    """The first of the configuration's seeds."""
    return built.key if built.key.ndim == 0 else built.key[0]


def stack_rows(models: np.ndarray, params: PyTree, dtype: str) -> PyTree:
    """Rows of a matrix as models like ``params``, stacked over clients."""
    leaves, structure = jax.tree.flatten(params)
    cuts = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = np.split(models.astype(dtype), cuts, axis=1)
    shaped = zip(parts, leaves, strict=True)
    return structure.unflatten(
        [part.reshape(len(models), *leaf.shape) for part, leaf in shaped]
    )


def _gap_bound(
    built: Built,
    params: PyTree,
    models: np.ndarray,
    norms: np.ndarray,
    known: Smoothness,
) -> Callable[[np.ndarray, np.ndarray], float]:
    """See ``Problem.gap``; ``min f_i >= f_i(x_i) - |g_i|^2/(2 mu_i)`` for found x_i."""
    _, layout = trees.ravel(params)
    train = built.federated_data.train
    own = stack_rows(models, params, "float64")
    mean_gap = mixture_gap(built.loss, train, own)
    convex = np.where(known.convex > 0, known.convex, np.inf)
    missed = np.where(norms > 0, norms**2 / (2 * convex), 0).mean()

    def gap(alpha: np.ndarray, average: np.ndarray) -> float:
        with precision("float64"):
            shared = trees.unravel(jnp.asarray(average), layout)
            return float(mean_gap(jnp.asarray(alpha), shared)) + missed

    return gap


def _check_transforms(config: Config) -> None:
    if config.privacy is not None:
        raise ConfigError(
            "privacy: there are no plans for noisy rounds; leave the table out"
        )
    if config.central is not None:
        raise ConfigError("central: there are no plans for a loss at the server")
    if config.compress is None:
        return
    how = config.compress.how
    if config.compress.down is not None:
        raise ConfigError("compress.down: there are no plans for it; leave it out")
    if config.compress.masks == "one":
        raise ConfigError("compress.masks: there are no plans for one mask")
    if how not in ("diana", "ef21"):
        # A biased compressor is the more helpful thing to name.
        theory_rates.solver(config.compress, 1, 1)
        raise ConfigError(
            f'compress.how: "{how}" has no plan, it ends in a neighborhood; there are '
            'plans for "diana" and "ef21", and without [compress]'
        )


def _shape(alpha: Any, clients: int) -> np.ndarray:
    if not isinstance(alpha, list):
        return np.ones(clients)
    if max(alpha) == 0:
        raise ConfigError("algorithm.alpha: all are 0, which leaves nothing to plan")
    return np.asarray(alpha) / max(alpha)


def _check_convex(built: Built, known: Smoothness, shape: np.ndarray) -> None:
    if (shape * known.convex).any():
        return
    one_class = one_class_clients(built.federated_data)
    if one_class:
        name = built.federated_data.name(one_class[0])
        raise ConfigError(
            f"model.l2: is 0, and {len(one_class)} clients have rows of one class only "
            f"(the first is {name!r}): their own models x_i do not exist"
        )
    raise ConfigError(
        "model.l2: is 0, and f_i are not strongly convex (mu = 0); plans need mu > 0"
    )


def _local_models(built: Built) -> tuple[np.ndarray, np.ndarray]:
    """x_i and the norms of their gradients, as enrollment finds them."""
    run = start_run(built, built.algorithm, built.model.init)
    next(iter(run))
    found = run.info()
    norms = np.asarray(found["local_model_gradient_norm"])
    try:
        bounds.require_minimizers(norms, ENOUGH)
    except ValueError as error:
        reason = str(error).partition(": ")[2]
        raise ConfigError(
            f"algorithm.personal.most: is too small to find x_i: {reason}; allow more, "
            "or take another solver, or a larger model.l2"
        ) from None
    return stack_models(found["local_model"]), norms
