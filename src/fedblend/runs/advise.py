# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which Mixed FL method a configuration should use: all three, tried and measured.

Each method runs the configuration with two seeds at five multiples of its rate, then at
its best multiple with ten other seeds. The final mixture ``w_f f_f + w_c f_c`` on
training rows decides, with the weights of the run. A rate at which some seed ends above
its start, or not finite, is out. A method is as good as the best one if it ends above
it by at most two standard errors over seeds and a twentieth of what training gained,
or by a negligible amount. Of those the cheapest is advised: parallel training sends the
least, one-way transfer computes the least at the server. The advice also names the
quantities of the theory: how much both gradients disagree, and their noise.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.config.build import Built, build
from fedblend.config.config import Config
from fedblend.config.tables.select import select_rows
from fedblend.config.theory_rates import with_rates
from fedblend.core import Algorithm, Batch, PyTree
from fedblend.errors import ConfigError
from fedblend.losses import gradient
from fedblend.metrics import mean_loss
from fedblend.runs.tune import rebuilt
from fedblend.simulation.sampling import weights_of
from fedblend.simulation.simulate import set_up
from fedblend.theory import mixed_fl as theory
from fedblend.theory.mixed_fl import Disagreement, Noise
from fedblend.trees import precision

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the rate that each method tries."""
SEEDS, BLOCKS = tuple(range(10)), 5
TUNING = (100, 101)
"""Seeds that try the rates."""
METHODS = ("parallel", "one_way", "two_way")
"""The cheapest first."""
DOUBT = 0.05
"""The fraction of what training gained that chance may hide."""
NEGLIGIBLE = 1e-4
"""The fraction of what training gained that is negligible."""
ROUNDING = 1e-6
"""The fraction of a loss that is rounding of float32."""
STEEP = 0.01
"""B^2 is that of models at which the squared norm of the mixture's gradient is at least
this fraction of its largest. At a minimum it is 0, and B^2 is rounding and chance."""


class Trial(NamedTuple):
    """The results of a method: the mixed loss of each seed, its parts, its cost."""

    start: np.ndarray
    loss: np.ndarray
    federated: float
    central: float
    bits_down: float
    """Bits per round and client."""
    factor: float = 1.0
    """The best multiple of the rate."""
    failed: str = ""
    """Why there is no loss."""
    models: Sequence[PyTree] = ()
    """Models of the first seed, at the start and during training."""


class Advice(NamedTuple):
    """The results of all methods, and which to use."""

    trials: dict[str, Trial]
    gap: float
    """G^2, the largest during training."""
    ratio: float
    """B^2, the largest during training where gradients are large; see ``STEEP``."""
    noise: Noise
    how: str
    why: str


def advise(config: Config, rounds: int | None = None) -> Advice:
    """Try all three methods.

    Args:
        config: what to run; its own ``central.how`` is not used.
        rounds: rounds of each trial, those of the configuration if None.

    Raises:
        ConfigError: there is no loss at the server to mix, or no method works.
    """
    table = config.central
    if table is None:
        raise ConfigError("central: is missing; there is no loss at the server to mix")
    if table.penalty is not None:
        raise ConfigError("central.penalty: advice needs rows of the server's own")
    if config.privacy is not None:
        raise ConfigError("privacy: trials on training rows are not private")
    if config.populations is not None:
        raise ConfigError("populations: advice weighs clients by their rows; leave out")
    trials = {}
    with precision(config.run.precision):
        built = build(config)
        for how in METHODS:
            try:
                # Rates that are too large overflow, and are out.
                with np.errstate(over="ignore", invalid="ignore"):
                    trials[how] = _tried(
                        config, built, how, rounds or config.run.rounds
                    )
            except Exception as error:
                # The results of the other methods must not be lost.
                text = str(error).removeprefix("mixed_fl: ").partition("\n")[0]
                if not isinstance(error, ValueError):
                    text = f"{type(error).__name__}: {text}"
                trials[how] = _failure(text)
        worst, noise = _known(config, built, trials)
    how, why = choice(trials, worst, noise)
    return Advice(trials, worst[0], worst[1], noise, how, why)


def choice(
    trials: dict[str, Trial], worst: list[float], noise: Noise
) -> tuple[str, str]:
    """The method to use, and why in a sentence.

    Args:
        trials: by method.
        worst: G^2 and B^2, the largest during training.
        noise: the noise of the gradients.
    """
    known = {how: one for how, one in trials.items() if not one.failed}
    if not known:
        why = "; ".join(f"{how}: {one.failed}" for how, one in trials.items())
        raise ConfigError(f"central: no method works; {why}")
    best = min(known, key=lambda how: known[how].loss.mean())
    gained = float((known[best].start - known[best].loss).mean())

    def alike(how: str) -> bool:
        gap = known[how].loss - known[best].loss
        doubt = 2 * gap.std(ddof=1) / np.sqrt(len(gap))
        rounding = ROUNDING * abs(known[best].loss.mean())
        allowed = max(min(doubt, DOUBT * gained), NEGLIGIBLE * gained, rounding)
        return bool(gap.mean() <= allowed)

    how = next(name for name in METHODS if name in known and alike(name))
    levels = {name: float(one.loss.mean()) for name, one in known.items()}
    # As many digits as tell the best loss from those that are worse.
    digits = next(
        number
        for number in range(4, 18)
        if all(
            f"{level:.{number}g}" != f"{levels[best]:.{number}g}"
            for name, level in levels.items()
            if not alike(name)
        )
    )
    named = {name: f"{name} ({level:.{digits}g})" for name, level in levels.items()}
    same = [named[name] for name in known if name != how and alike(name)]
    worse = [named[name] for name in known if not alike(name)]
    parts = [f"{named[how]} has the least mixed loss"]
    if same:
        parts = [
            f"{named[how]} cannot be told apart from {', '.join(same)} and is cheaper"
        ]
    if worse:
        parts.append(f"{', '.join(worse)} end{'s' if len(worse) == 1 else ''} higher")
    out = [name for name in trials if name not in known]
    if out:
        parts.append(f"{' and '.join(out)} {'is' if len(out) == 1 else 'are'} out")
    if "parallel" in known and not alike("parallel"):
        parts.append(
            f"the losses disagree (G^2 up to {worst[0]:.3g}, B^2 up to {worst[1]:.3g})"
        )
    if "one_way" in known and not alike("one_way") and noise.central > 0:
        parts.append(
            f"the server's gradients are noisy (sigma_c^2 {float(noise.central):.3g}, "
            f"sigma^2 {float(noise.clients):.3g}): try a larger central.batch_size"
        )
    return how, "; ".join(parts)


def largest(found: Disagreement) -> list[float]:
    """The largest G^2 and B^2 of several points; see ``STEEP``."""
    steep = found.mixed >= STEEP * found.mixed.max()
    ratio = jnp.where(steep, found.ratio, -jnp.inf).max()
    return [float(found.gap.max()), float(ratio)]


def _tried(config: Config, built: Built, how: str, rounds: int) -> Trial:
    """A method at its best rate."""
    every = [(factor, seed) for factor in FACTORS for seed in TUNING]
    tuned = _replicas(config, built, how, rounds, every)
    shape = len(FACTORS), len(TUNING)
    losses = np.where(_good(tuned), tuned.loss, np.inf).reshape(shape).mean(axis=1)
    for best in np.argsort(losses)[: np.isfinite(losses).sum()]:
        again = [(FACTORS[best], seed) for seed in SEEDS]
        found = _replicas(config, built, how, rounds, again)
        if _good(found).all():
            return found._replace(factor=FACTORS[best])
    return _failure(f"ends above its start at all of {len(FACTORS)} rates")


def _good(trial: Trial) -> np.ndarray:
    """Which replicas ended with a finite loss that is not above that of the start."""
    return np.isfinite(trial.loss) & (trial.loss <= trial.start)


def _replicas(
    config: Config,
    built: Built,
    how: str,
    rounds: int,
    replicas: list[tuple[float, int]],
) -> Trial:
    """A method with these pairs of a multiple of the rate and a seed, side by side."""
    assert config.central is not None and built.server is not None
    loss, weight = mean_loss(built.loss), config.central.weight
    watched = dataclasses.replace(
        built.spec,
        algorithm=lambda factor: _algorithm(config, built, how, factor),
        federated_data=built.federated_data,
        key=jax.vmap(jax.random.key)(jnp.asarray([seed for _, seed in replicas])),
        measure={"loss": loss},
        measure_on=None,
        splits=["train"],
        rounds=rounds,
        every=max(rounds // BLOCKS, 1),
        over=jnp.asarray([factor for factor, _ in replicas]),
    )
    run = set_up(watched)
    own = Batch(jax.tree.map(jnp.asarray, built.server.train.rows(0)))

    uniform = _weights(built) == "uniform"

    def sides() -> np.ndarray:
        """The clients' loss and the server's, of every replica."""
        spreads = [measures["train"]["personal"]["loss"] for measures in run.results]
        federated = [of.mean if uniform else of.weighted for of in spreads]
        return np.array([federated, jax.vmap(loss, (0, None))(run.shared, own)], float)

    blocks = iter(run)
    next(blocks)
    starts = sides()
    models = [trees.take(run.shared, 0)]
    models += [trees.take(run.shared, 0) for _ in blocks]
    ends = sides()
    start, end = ((1 - weight) * f + weight * c for f, c in (starts, ends))
    bits = run.records[-1][0].bits_down / rounds / built.federated_data.clients
    clients, server = map(float, ends.mean(axis=1))
    return Trial(start, end, clients, server, bits, models=models)


def _algorithm(config: Config, built: Built, how: str, factor: Any) -> Algorithm:
    """The algorithm with another Mixed FL method, at a multiple of its rate."""
    assert config.central is not None
    params = jax.eval_shape(built.model.init, jax.random.key(0))
    options, _ = with_rates(config, built.smoothness, trees.size(params))
    rule = options.optimizer
    if options.rate is not None:
        scaled = {"rate": factor * options.rate}
    elif isinstance(rule, float):
        scaled = {"optimizer": factor * rule}
    else:
        rule = rule.model_copy(update={"rate": factor * rule.rate})
        scaled = {"optimizer": rule}
    options = options.model_copy(update=scaled)
    own = config.central.rate
    table = config.central.model_copy(
        update={"how": how, "rate": None if own is None else factor * own}
    )
    changed = config.model_copy(update={"algorithm": options, "central": table})
    return select_rows(config, rebuilt(changed, built), [built.federated_data])


def _weights(built: Built) -> str:
    """How the run weighs its clients, and so which mean over them it minimizes."""
    return built.spec.weights or built.algorithm.needs.weights


def _failure(why: str) -> Trial:
    nothing = np.full(len(SEEDS), np.nan)
    return Trial(nothing, nothing, np.nan, np.nan, np.nan, failed=why)


def _known(
    config: Config, built: Built, trials: dict[str, Trial]
) -> tuple[list[float], Noise]:
    """The disagreement and noise of the gradients; NaN where they are unknown."""
    assert config.central is not None and built.server is not None
    weights = weights_of(_weights(built), built.federated_data)
    points = [model for one in trials.values() for model in one.models]
    rows, own = built.server.train.shard(0), Batch(built.server.train.rows(0))
    parts = 1 - config.central.weight, config.central.weight

    def at(point):
        federated = theory.federated_gradient(
            built.loss, point, built.federated_data, weights=weights
        )
        return theory.disagreement(federated, gradient(built.loss)(point, own), parts)

    try:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *points)
        worst = largest(jax.lax.map(at, stacked))
        noise = theory.noise(
            built.loss,
            built.model.init(jax.random.key(0)),
            built.federated_data,
            jax.random.key(0),
            batch_size=config.algorithm.rows(),
            central=rows,
            central_loss=built.loss,
            central_batch=config.central.batch_size,
            weights=weights,
        )
    except Exception:
        # The trials decide without these quantities.
        nothing = jnp.asarray(jnp.nan)
        return [float("nan")] * 2, Noise(nothing, nothing)
    return worst, noise
