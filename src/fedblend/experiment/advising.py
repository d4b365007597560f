# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which way of Mixed FL to use for a configuration: all three, tried and measured.

Every way runs the configuration with some seeds. What decides is the mixture itself,
``w_f f_f + w_c f_c`` on training rows at the end; ways that differ by less than two
standard errors over seeds are alike, and then the cheaper one is taken: parallel
training sends least, one-way transfer computes least at the server. Beside it stands
what theory looks at: how far both gradients disagree on the way, and their noise.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Batch, PyTree
from fedblend.experiment.build import Built, build
from fedblend.experiment.config import Config
from fedblend.experiment.section import ConfigError
from fedblend.metrics import mean_loss
from fedblend.objectives import gradient
from fedblend.runtime.precision import precision
from fedblend.runtime.simulate import simulate
from fedblend.theory import mixed as theory

WAYS = ("parallel", "one_way", "two_way")
"""The ways, the cheapest first."""
SEEDS, BLOCKS = 3, 5


class Trial(NamedTuple):
    """How a way did: the mixture's loss of each seed, its parts, and its price."""

    loss: np.ndarray
    federated: float
    central: float
    bits_down: float
    refused: str = ""


class Advice(NamedTuple):
    """What was found, and what to use."""

    trials: dict[str, Trial]
    gap: float
    """G^2, the largest on the way."""
    ratio: float
    """B^2, the largest on the way."""
    noise: theory.Noise
    how: str
    why: str


def advise(config: Config, rounds: int | None = None) -> Advice:
    """Try all three ways.

    Args:
        config: what to run; its own ``central.how`` is not used.
        rounds: how many, those of the configuration if None.

    Raises:
        ConfigError: there is no loss at the server to mix.
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
    trials, points = {}, []
    with precision(config.run.precision):
        for how in WAYS:
            chosen = table.model_copy(update={"how": how})
            built = build(config.model_copy(update={"central": chosen}))
            trials[how], seen = _tried(built, config, rounds or config.run.rounds)
            points += seen
        noise = _noise(built, config)
        worst = _largest_disagreement(built, points, table.weight)
    how, why = _choice(trials, worst, noise)
    return Advice(trials, worst[0], worst[1], noise, how, why)


def _tried(built: Built, config: Config, rounds: int) -> tuple[Trial, list[PyTree]]:
    """A trial, and models of its first seed on the way."""
    assert config.central is not None and built.server is not None
    w_c, loss = config.central.weight, mean_loss(built.loss)
    watched = {"measure": {"loss": loss}, "splits": ["train"]}
    every = max(rounds // BLOCKS, 1)
    run = simulate(
        built.algorithm,
        built.model.init,
        built.federation,
        jax.vmap(jax.random.key)(jnp.arange(SEEDS)),
        **{**built.settings, **watched, "rounds": rounds, "every": every},
    )
    seen = []
    try:
        for record in run:
            if record[0].round:
                seen.append(trees.take(run.shared, 0))
    except ValueError as error:
        if not str(error).startswith("mixed: "):
            raise
        nothing = float("nan")
        refused = str(error).removeprefix("mixed: ")
        return Trial(np.full(SEEDS, np.nan), nothing, nothing, nothing, refused), []
    own = Batch(built.server.train.rows(0))
    central = np.array(
        [float(loss(trees.take(run.shared, lane), own)) for lane in range(SEEDS)]
    )
    federated = np.array(
        [one.measures["train"]["personal"]["loss"].weighted for one in run.records[-1]]
    )
    bits = run.records[-1][0].bits_down / rounds / built.federation.clients
    both = (1 - w_c) * federated + w_c * central
    return Trial(both, float(federated.mean()), float(central.mean()), bits), seen


def _largest_disagreement(
    built: Built, points: list[PyTree], weight: float
) -> list[float]:
    """G^2 and B^2, the largest at some models."""
    assert built.server is not None
    own = Batch(built.server.train.rows(0))

    def at(point):
        central = gradient(built.loss)(point, own)
        federated = theory.federated_slope(built.loss, point, built.federation)
        return theory.disagreement(federated, central, (1 - weight, weight))

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *points)
    return [float(jnp.max(values)) for values in jax.lax.map(at, stacked)]


def _noise(built: Built, config: Config) -> theory.Noise:
    assert config.central is not None and built.server is not None
    size: Any = config.algorithm.batch_size
    total = built.server.train.total
    return theory.noise(
        built.loss,
        built.model.init(jax.random.key(0)),
        built.federation,
        jax.random.key(0),
        batch_size=size or built.federation.train.capacity,
        central=built.server.train.shard(0),
        central_loss=built.loss,
        central_batch=config.central.batch_size or total,
    )


def _choice(
    trials: dict[str, Trial], worst: list[float], noise: theory.Noise
) -> tuple[str, str]:
    """The way to use, and why in a sentence."""
    known = {how: one for how, one in trials.items() if np.isfinite(one.loss).all()}
    if not known:
        raise ConfigError("central: all three ways diverge or are refused")
    best = min(known, key=lambda how: known[how].loss.mean())

    def alike(how: str) -> bool:
        gap = known[how].loss - known[best].loss
        return bool(gap.mean() <= 2 * gap.std(ddof=1) / np.sqrt(len(gap)))

    how = next(way for way in WAYS if way in known and alike(way))
    said = {way: f"{way} ({one.loss.mean():.4g})" for way, one in known.items()}
    same = [said[way] for way in known if way != how and alike(way)]
    worse = [said[way] for way in known if not alike(way)]
    parts = [f"{said[how]} has the least mixed loss"]
    if same:
        parts = [
            f"{said[how]} cannot be told apart from {', '.join(same)} and is cheaper"
        ]
    if worse:
        parts.append(f"{', '.join(worse)} end{'s' if len(worse) == 1 else ''} higher")
    if "parallel" in known and not alike("parallel"):
        parts.append(
            f"the losses disagree (G^2 up to {worst[0]:.3g}, B^2 up to {worst[1]:.3g})"
        )
    if "one_way" in known and not alike("one_way"):
        parts.append(
            f"the server's gradients are noisy (sigma_c^2 {float(noise.central):.3g}, "
            f"sigma^2 {float(noise.clients):.3g}): try a larger central.batch_size"
        )
    return how, "; ".join(parts)
