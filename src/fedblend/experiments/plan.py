# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans for a configuration of FLIX: the alpha a budget allows, the rounds it needs.

``problem`` finds the constants of a configuration and its local models x_i, in float64.
``promises`` makes plans from them. The first round of a plan collects x_avg, the others
are the ``run.rounds`` of a run. Bits are those that a run counts, plus the last
broadcast, that of the model to deploy. They are counted from the shapes of messages; a
message of variable length counts with its largest.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fedblend.config import model
from fedblend.config.build import Built, build
from fedblend.config.compression import compressed
from fedblend.config.config import Config
from fedblend.config.toml import literal
from fedblend.core import Algorithm, PyTree, Ragged, has_ragged, static_bits
from fedblend.data.federated import one_class_clients
from fedblend.errors import ConfigError
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import simulate
from fedblend.theory import plan
from fedblend.theory.bounds import require_minimizers
from fedblend.theory.constants import Mixture, Smoothness, mixture, stacked
from fedblend.theory.plan import Plan, Solver, Traffic
from fedblend.trees import precision

GRID = tuple(tenth / 10 for tenth in range(1, 11))
"""The alphas of a table."""
TOLERANCE, PATIENCE = 1e-9, 10
"""The gradient norm to which x_i are solved, and by how many times more steps."""
ENOUGH = 1e-6
"""The largest gradient norm of an x_i that passes as a minimizer."""
DIGITS = 6
"""Digits to which an alpha is rounded down, so that a command can hold it."""
SINGLE = 1e-5
"""The smallest difference of losses that float32 resolves."""


class Scheme(NamedTuple):
    """A solver, and what its rounds cost."""

    solver: Solver
    traffic: Traffic
    at_most: bool
    """The costs are upper bounds, because messages vary in length."""
    configured: bool
    """Whether the configuration runs this solver."""


class Problem(NamedTuple):
    """The constants and local models that plans for a configuration need."""

    smoothness: Smoothness
    personal: np.ndarray
    """x_i, a row for every client."""
    gradient_norm: float
    """The largest norm of a gradient of f_i at x_i."""
    shape: np.ndarray
    """alpha_i in units of the largest."""
    schemes: tuple[Scheme, ...]

    @property
    def known(self) -> Mixture:
        """The constants of f~ for alpha = 1 in this shape."""
        return mixture(self.shape, self.smoothness, self.personal)


class Promise(NamedTuple):
    """A plan, and how to run it."""

    scheme: Scheme
    plan: Plan
    rate: float
    """The step, ``algorithm.rate``."""
    settings: tuple[str, ...]
    """For ``fedblend run --set``; empty where there is nothing to run."""


def problem(config: Config) -> Problem:
    """Build the configuration, solve for x_i in float64, and count bits.

    Raises:
        ConfigError: theory has nothing to say about the configuration.
        DataError: the data cannot be had, or cannot be used.
    """
    options: Any = config.algorithm
    if options.name != "flix":
        raise ConfigError(f'algorithm.name: "{options.name}" has no plan, only "flix"')
    own = options.personal
    if own.solver == "sgd":
        raise ConfigError(
            'algorithm.personal.solver: "sgd" does not minimize f_i, which plans need; '
            "lbfgs, newton and gradient_descent do"
        )
    _check_transforms(config)
    model.require_assumptions(config)
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
        model.require_assumptions(config, clients)
        known = model.require_known(built.smoothness, "plan")
        shape = _shape(options.alpha, clients)
        _check_convex(built, known, shape)
        models, norms = _local_models(built)
        params = jax.device_get(built.model.init(built.key))
    with precision(config.run.precision):
        schemes = _schemes(config, built, params)
    return Problem(known, models, float(norms.max()), shape, schemes)


def promises(
    found: Problem,
    eps: float,
    *,
    alpha: float | None = None,
    rounds: int | None = None,
    bits: float | None = None,
) -> list[Promise]:
    """Plans for an alpha, a number of rounds or of bits; without any, for a grid.

    Args:
        found: from ``problem``.
        eps: the accuracy, ``f~ - min f~``.
        alpha: find the rounds and bits that it needs.
        rounds: find the largest alpha that so many allow, the round of x_avg included.
        bits: find the largest alpha that so many allow.

    Returns:
        For every scheme, one plan or those of the grid.
    """
    if sum(value is not None for value in (alpha, rounds, bits)) > 1:
        raise ValueError("alpha, rounds, bits: give at most one of them")
    made = []
    for scheme in found.schemes:
        common: Any = {"solver": scheme.solver, "shape": found.shape}
        data = (eps, found.smoothness, found.personal)
        alphas: Iterable[float] = GRID if alpha is None else (alpha,)
        if rounds is not None:
            alphas = (plan.largest_alpha(rounds, *data, **common).alpha,)
        if bits is not None:
            traffic = scheme.traffic
            most = plan.largest_alpha_for_bits(bits, *data, traffic, **common)
            alphas = (most.alpha,)
        if alpha is None:
            alphas = map(_rounded_down, alphas)
        common["traffic"] = scheme.traffic
        plans = plan.table(alphas, *data, **common)
        made += [_promise(found, scheme, one) for one in plans]
    return made


def warnings(config: Config, found: Problem, made: Iterable[Promise]) -> list[str]:
    """Reasons why a run of the configuration may miss its promise.

    Plans are for exact x_i and exact sums. An x_i found to a gradient norm t is within
    t/mu_i of the exact one, which moves the root of V by at most that much.
    """
    plans = [promise.plan for promise in made]
    eps, alpha = plans[0].eps, max(one.alpha for one in plans)
    known, options = found.known, cast(Any, config.algorithm)
    tolerance = options.personal.tolerance
    convex = found.smoothness.convex
    far = tolerance / float(convex[convex > 0].min())
    moved = alpha**2 * known.L_alpha * (math.sqrt(known.V) * far + far**2 / 2)
    lines = []
    if moved > eps / 10:
        better = 10 ** math.floor(math.log10(tolerance * eps / (10 * moved)))
        lines.append(
            f"x_i found to a gradient norm of {tolerance:g} may miss the bound by up "
            f"to {moved:.2g}, more than a tenth of eps; set "
            f"algorithm.personal.tolerance={better:.0e}"
        )
    if config.run.precision == "float32" and eps < SINGLE:
        lines.append(
            f"eps = {eps:g} is below what float32 can tell; run.precision=float64 can"
        )
    return lines


def _promise(found: Problem, scheme: Scheme, made: Plan) -> Promise:
    alphas = made.alpha * found.shape
    equal = bool((found.shape == 1).all())
    settings = ()
    if scheme.configured and made.rounds:
        settings = (
            f"algorithm.alpha={literal(made.alpha if equal else alphas.tolist())}",
            "algorithm.rate=theory",
            f"run.rounds={made.rounds - 1}",
        )
    rate = model.step(scheme.solver, alphas, found.smoothness)
    return Promise(scheme, made, rate, settings)


def _rounded_down(alpha: float) -> float:
    if alpha == 0:
        return alpha
    places = DIGITS - 1 - math.floor(math.log10(alpha))
    return math.floor(round(alpha * 10**places, 3)) / 10**places


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
    if how not in ("diana", "ef21"):
        # A biased compressor is the more helpful thing to name.
        model.solver(config.compress, 1, 1)
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
    run = _started(built, built.algorithm, built.model.init)
    next(iter(run))
    found = run.info()
    norms = np.asarray(found["local_model_gradient_norm"])
    try:
        require_minimizers(norms, ENOUGH)
    except ValueError as error:
        reason = str(error).partition(": ")[2]
        raise ConfigError(
            f"algorithm.personal.most: is too small to find x_i: {reason}; allow more, "
            "or take another solver, or a larger model.l2"
        ) from None
    return stacked(found["local_model"]), norms


def _started(built: Built, algorithm: Algorithm, params: Any) -> Run:
    """A run of no rounds, with the first of the seeds."""
    key = built.key if built.key.ndim == 0 else built.key[0]
    return simulate(algorithm, params, built.federated_data, key, rounds=0)


def _schemes(config: Config, built: Built, params: PyTree) -> tuple[Scheme, ...]:
    """Gradient descent, and gradient descent with the table ``[compress]``.

    Args:
        config: what to run.
        built: the same without compression.
        params: parameters of its model, in any precision.
    """
    table, plain = config.compress, built.algorithm
    params = jax.tree.map(lambda leaf: leaf.astype(config.run.precision), params)
    clients = built.federated_data.clients
    dim = sum(leaf.size for leaf in jax.tree.leaves(params))

    def run_of(start: str | None) -> Run:
        wanted = table and table.model_copy(update={"start": start})
        wrapped = compressed(wanted if start else None, plain, dim, clients)
        return _started(built, wrapped, params)

    alone = run_of(None)
    first = Scheme(plan.DGD, _traffic(alone, alone), False, table is None)
    if table is None:
        return (first,)
    usual, actual = run_of("zero"), run_of(table.start)
    at_most = has_ragged(usual.shapes.up)
    solver = model.solver(table, dim, clients)
    return first, Scheme(solver, _traffic(usual, actual), at_most, True)


def _traffic(usual: Run, actual: Run) -> Traffic:
    """The bits of all clients, from the sizes of messages that a run counts.

    Args:
        usual: a run whose every round is like the later ones of the actual run.
        actual: the run, whose first round may take more.
    """
    clients, sizes = actual.federated_data.clients, actual.message_bits
    up = _whole_bits(usual.shapes.up)
    return Traffic(
        first=clients * (sizes.params + sizes.join + sizes.down),
        later=clients * (up + sizes.down),
        start=clients * (_whole_bits(actual.shapes.up) - up),
    )


def _whole_bits(message: PyTree) -> int:
    """Bits of a message whose parts of variable length have their largest size."""

    def whole(leaf: Any) -> Any:
        return leaf.buffer if isinstance(leaf, Ragged) else leaf

    is_ragged = {"is_leaf": lambda leaf: isinstance(leaf, Ragged)}
    return static_bits(jax.tree.map(whole, message, **is_ragged))
