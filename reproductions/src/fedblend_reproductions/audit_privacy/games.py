# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Play: run a configuration with canaries many times, and collect what is seen."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from fedblend import trees
from fedblend.config.build import Built, method
from fedblend.config.config import Config, rename_errors
from fedblend.config.tables.privacy import Privacy
from fedblend.errors import ConfigError
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import set_up
from fedblend_reproductions.audit_privacy.attack import Games
from fedblend_reproductions.audit_privacy.canaries import (
    Directions,
    directions,
    with_canaries,
)

MOST_ENTRIES = 2**27
"""Of the models of all replicas that are run side by side."""
OnStep = Callable[[int, int], None]
"""Called with the rounds that were run, and all there are."""


def play(
    config: Config,
    built: Built,
    *,
    trials: int,
    seed: int,
    canaries: int,
    on_step: OnStep,
) -> tuple[Games, Directions]:
    """Run a configuration with canaries, each replica with noise of its own.

    Args:
        config: with ``[privacy]``, of one seed.
        built: what it builds.
        trials: how often it is run.
        seed: of coins and directions.
        canaries: at most so many in a run.
        on_step: called after every round.
    """
    table, clients = config.privacy, built.federated_data.clients
    assert table is not None
    plain = dataclasses.replace(
        built.spec, federated_data=built.federated_data, measure={}, every=1
    )
    with rename_errors():
        sent = jax.tree.leaves(set_up(plain).shapes.decoded.delta)
    sizes = [leaf.size for leaf in sent]
    number = min(clients, canaries, sum(sizes) // 2)
    if not number:
        raise ConfigError("model: clients send one number; an audit needs two")
    along, owners = directions(sizes, number, seed), np.full(clients, -1)
    owners[np.random.default_rng(seed).permutation(clients)[:number]] = range(number)
    params = jax.eval_shape(built.model.init, jax.random.key(0))
    inside = partial(
        with_canaries,
        params=params,
        along=along,
        owners=owners,
        clip=table.clip,
        adjacency=table.adjacency,
    )
    cohort = config.run.cohort or clients
    made = method(config, built.task, clients, cohort, built.smoothness, within=inside)
    keys = jax.random.split(jax.random.key(seed), trials)
    most = max(1, MOST_ENTRIES // trees.size(params))
    found = []
    for first in range(0, trials, most):
        part = keys[first : first + most]
        run = set_up(
            dataclasses.replace(
                plain,
                algorithm=made.algorithm,
                params=built.model.init(part[0]),
                key=part,
            )
        )
        step = partial(_step, on_step, first, len(part), trials)
        found.append(_watch(run, owners, table, step))
    return Games(*map(np.concatenate, zip(*found, strict=True))), along


def _step(on_step: OnStep, before: int, runs: int, trials: int, run: Run) -> None:
    on_step(before * run.rounds + runs * run.round, trials * run.rounds)


def _watch(
    run: Run,
    owners: np.ndarray,
    table: Privacy,
    on_step: Callable[[Run], None],
) -> Games:
    """Everything that the observer sees of a run, round by round.

    In units of how far one client moves the mean of the round, which is that of a bound
    that was sent before if it is adaptive.
    """
    seen, unit = [], np.full(len(run.key), table.clip / run.cohort)
    for _ in run:
        extra = jax.device_get(run.down.extra)
        last = extra["seen"]
        if run.round:
            seen.append(last.products / unit[:, None, None])
        if table.adaptive:
            unit = np.asarray(extra["adaptive_clip"]) / run.cohort
        on_step(run)
    who = np.argsort(owners)[np.sum(owners < 0) :]
    coins = np.asarray(run.client_states(who)).T
    return Games(coins, np.stack(seen, axis=1), _chances(run, who))


def _chances(run: Run, who: np.ndarray) -> np.ndarray:
    """The probability with which each canary takes part in each round of each run.

    It is 0 or 1 for an observer who can compute the cohorts.
    """
    clients, rounds = run.federated_data.clients, range(run.rounds)
    shape = (len(run.key), len(who), run.rounds)
    needs = run.settings.build(None).needs
    secret = needs.secret_cohorts and not run.cohorts.asked.epoch
    if secret or run.cohort == clients:
        return np.full(shape, run.cohort / clients)
    drawn = [run.cohorts.draw(root, rounds) for root in run.key]
    found = [(ids[:, None] == who[:, None]).any(axis=-1).T for ids in drawn]
    return np.stack(found).astype(float)
