# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which Mixed FL method a configuration should use: all three, tried and measured.

Each method runs the configuration with two seeds at five multiples of its rate, then at
its best multiple with ten other seeds. The final mixture ``w_f f_f + w_c f_c`` on
training rows decides, with the weights of the run. A rate at which some seed ends above
its start, or not finite, is out. A method is as good as the best one if it ends above
it by at most two standard errors over seeds and a twentieth of what training gained,
or by a negligible amount. Of those the cheapest is advised: parallel training sends the
least, one-way transfer computes the least at the server.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.config.build import Built, build
from fedblend.config.config import Config, load
from fedblend.config.theory_rates import theory_values
from fedblend.core import Algorithm, Batch
from fedblend.errors import ConfigError, InputError
from fedblend.metrics import mean_loss
from fedblend.report.tables import human_bits
from fedblend.runs.tune import rebuild
from fedblend.simulation.compile import compile_cache
from fedblend.simulation.simulate import set_up
from fedblend.trees import precision

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the rate that each method tries."""
SEEDS = tuple(range(10))
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


class Advice(NamedTuple):
    """The results of all methods, and which to use."""

    trials: dict[str, Trial]
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
                    trials[how] = _try_method(
                        config, built, how, rounds or config.run.rounds
                    )
            except Exception as error:
                # The results of the other methods must not be lost.
                text = str(error).removeprefix("mixed_fl: ").partition("\n")[0]
                if not isinstance(error, ValueError):
                    text = f"{type(error).__name__}: {text}"
                trials[how] = _failure(text)
    return Advice(trials, *choice(trials, table.batch_size))


def choice(
    trials: dict[str, Trial], central_batch: int | None = None
) -> tuple[str, str]:
    """The method to use, and why in a sentence.

    Args:
        trials: by method.
        central_batch: rows of a step at the server, None for all.
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
    if central_batch and "one_way" in known and not alike("one_way"):
        parts.append("a larger central.batch_size may help one_way")
    return how, "; ".join(parts)


def _try_method(config: Config, built: Built, how: str, rounds: int) -> Trial:
    """A method at its best rate."""
    every = [(factor, seed) for factor in FACTORS for seed in TUNING]
    tuned = _replicas(config, built, how, rounds, every)
    shape = len(FACTORS), len(TUNING)
    losses = np.where(_succeeds(tuned), tuned.loss, np.inf).reshape(shape).mean(axis=1)
    for best in np.argsort(losses)[: np.isfinite(losses).sum()]:
        again = [(FACTORS[best], seed) for seed in SEEDS]
        found = _replicas(config, built, how, rounds, again)
        if _succeeds(found).all():
            return found._replace(factor=FACTORS[best])
    return _failure(f"ends above its start at all of {len(FACTORS)} rates")


def _succeeds(trial: Trial) -> np.ndarray:
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
        every=max(rounds, 1),
        over=jnp.asarray([factor for factor, _ in replicas]),
    )
    run = set_up(watched)
    own = Batch(jax.tree.map(jnp.asarray, built.server.train.rows(0)))
    # How the run weighs its clients, and so which mean over them it minimizes.
    uniform = (built.spec.weights or built.algorithm.needs.weights) == "uniform"

    def sides() -> np.ndarray:
        """The clients' loss and the server's, of every replica."""
        spreads = [measures["train"]["personal"]["loss"] for measures in run.results]
        federated = [of.mean if uniform else of.weighted for of in spreads]
        return np.array([federated, jax.vmap(loss, (0, None))(run.shared, own)], float)

    next(iter(run))
    starts = sides()
    run.complete()
    ends = sides()
    start, end = ((1 - weight) * f + weight * c for f, c in (starts, ends))
    bits = run.records[-1][0].bits_down / rounds / built.federated_data.clients
    clients, server = map(float, ends.mean(axis=1))
    return Trial(start, end, clients, server, bits)


def _algorithm(config: Config, built: Built, how: str, factor: Any) -> Algorithm:
    """The algorithm with another Mixed FL method, at a multiple of its rate."""
    assert config.central is not None
    params = jax.eval_shape(built.model.init, jax.random.key(0))
    theory, _ = theory_values(config, built.smoothness, trees.size(params))
    scaled = config.algorithm.scale_rate(factor, theory)
    values = {f"algorithm.{key}": value for key, value in scaled.items()}
    if config.central.rate is not None:
        values["central.rate"] = factor * config.central.rate
    table = config.central.model_copy(update={"how": how})
    changed = config.model_copy(update={"central": table})
    return rebuild(changed, built, values)


def _failure(why: str) -> Trial:
    nothing = np.full(len(SEEDS), np.nan)
    return Trial(nothing, nothing, np.nan, np.nan, np.nan, failed=why)


def main() -> None:
    """Print the trials of all methods for a TOML file, and which to use."""
    parser = argparse.ArgumentParser(
        prog="python -m fedblend_reproductions.mixed.advise",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("file", type=Path, help="TOML file with the table [central]")
    parser.add_argument("--rounds", type=int, help="rounds of each trial")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    compile_cache()
    try:
        found = advise(load(options.file, options.set), options.rounds)
    except (InputError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    for how, trial in found.trials.items():
        line = trial.failed or (
            f"{trial.factor:g} times the rate, mixed loss {trial.loss.mean():.4f} "
            f"(clients {trial.federated:.4f}, server {trial.central:.4f}), "
            f"{human_bits(trial.bits_down)} down per round"
        )
        print(f"{how}: {line}")
        if trial.factor in (FACTORS[0], FACTORS[-1]):
            print(f"{how}: this is the first or last rate tried; try another")
    factor = found.trials[found.how].factor
    rate = "" if factor == 1 else f" at {factor:g} times the rate"
    print(f'use central.how = "{found.how}"{rate}: {found.why}.')


if __name__ == "__main__":
    main()
