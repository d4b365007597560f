# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Audit the clip and the noise that a node's policy puts on its answers.

The observer is the server, which sees every answer of the node and chooses what it asks
for. Each game is a node of its own: a canary tosses a coin, and answers in every round
with an update along one direction or against it, clipped and perturbed by the functions
that the node itself uses. The promise is that of the node's ledger after these answers.
"""

import dataclasses
from functools import cache

import jax
import numpy as np

from fedblend.config.build import Built, build
from fedblend.config.config import Config
from fedblend.core import Up
from fedblend.errors import ConfigError
from fedblend.simulation.simulate import set_up
from fedblend.theory.privacy import gaussian_epsilon
from fedblend.trees import precision
from fedblend_federation.client.build import protect_setup
from fedblend_federation.client.executor import ClientSetup
from fedblend_federation.client.ledger import DELTA
from fedblend_federation.policy.policy import Policy, Protect, Refusal
from fedblend_reproductions.audit_privacy.attack import Games
from fedblend_reproductions.audit_privacy.audit import TRIALS, Audit, judge
from fedblend_reproductions.audit_privacy.canaries import (
    COINS,
    Directions,
    directions,
    with_canaries,
)
from fedblend_reproductions.audit_privacy.games import OnStep

NODES = 16
"""Nodes of a trial, each a game of its own."""
ADJACENCY = "replace_one"
"""Other rows of a node may turn an answer round: they move it by two clips."""


def audit_node(
    config: Config,
    policy: Policy,
    *,
    delta: float = DELTA,
    trials: int = TRIALS,
    seed: int = 0,
    confidence: float = 0.95,
    canaries: int = NODES,
    on_step: OnStep = lambda done, rounds: None,
) -> Audit:
    """Attack the answers of a node, and bound the epsilon of its ledger from below.

    Args:
        config: of an experiment that the node takes part in, with data.
        policy: of the node.
        delta: at which epsilon is counted; the node's ledger has the default.
        trials: how often ``NODES`` nodes take part in it, or fewer.
        seed: of coins and directions; the noise is the operating system's.
        confidence: that the lower bound is below the true epsilon.
        canaries: at most so many nodes in a trial.
        on_step: called with the rounds that were run, and all there are.

    Raises:
        ConfigError: the policy has no noise, or refuses the experiment.
    """
    protect, rounds = policy.protect, config.run.rounds
    if not protect.noise or protect.clip is None:
        raise ConfigError("policy: protect.noise is 0; there is no epsilon to audit")
    if not rounds:
        raise ConfigError("run.rounds: 0; without a round there is nothing to audit")
    reason = policy.refusal(config)
    if reason is not None:
        raise ConfigError(reason)
    with precision(config.run.precision):
        setup, ups, along = _canaries(build(config), protect, seed)
    nodes = trials * min(NODES, canaries)
    coins = np.random.default_rng(seed).choice(COINS[ADJACENCY], nodes)
    seen = np.empty((nodes, rounds, *along.parts.shape))
    for node, coin in enumerate(coins):
        for round in range(rounds):
            seen[node, round] = _seen(setup, ups[float(coin)], along)
        on_step((node + 1) * rounds, nodes * rounds)

    @cache
    def promise(factor: float, delta: float) -> float:
        return gaussian_epsilon(rounds * setup.squared / factor**2, delta)

    return judge(
        Games(coins[:, None], seen / protect.clip, np.ones((nodes, 1, rounds))),
        along,
        promise,
        delta=delta,
        adjacency=ADJACENCY,
        trials=trials,
        seed=seed,
        confidence=confidence,
    )


def _canaries(
    built: Built, protect: Protect, seed: int
) -> tuple[ClientSetup, dict[float, Up], Directions]:
    """The setup of a node, its clipped update by coin, and the canary's direction."""
    assert protect.clip is not None
    data = built.federated_data
    spec = dataclasses.replace(built.spec, federated_data=data, measure={}, every=1)
    shapes = set_up(spec).shapes
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes.decoded.delta)]
    if sum(sizes) < 2:
        raise ConfigError("model: clients send one number; an audit needs two")
    along = directions(sizes, 1, seed)
    canary = with_canaries(
        built.algorithm,
        params=shapes.params,
        along=along,
        owners=np.zeros(data.clients, int),
        clip=protect.clip,
        adjacency=ADJACENCY,
    )
    key, shard = jax.random.key(seed), data.train.shard(0)
    try:
        setup = protect_setup(
            ClientSetup(0, canary, shapes.params, key, {}, {}, {}), protect
        )
        jax.eval_shape(setup.algorithm.enroll, shapes.params, shard, key)
        run = set_up(dataclasses.replace(spec, algorithm=canary))
        next(iter(run))
        client = jax.jit(setup.algorithm.client)
        ups = {
            coin: client(run.down, np.asarray(coin, float), shard, key)[0]
            for coin in COINS[ADJACENCY]
        }
    except Refusal as error:
        raise ConfigError(str(error)) from None
    return setup, ups, along


def _seen(setup: ClientSetup, up: Up, along: Directions) -> np.ndarray:
    """Products of a noisy answer with all directions, ``[groups, blocks]``."""
    assert setup.perturb is not None
    leaves = jax.tree.leaves(setup.perturb(up).delta)
    noisy = np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(float)
    groups, blocks = along.parts.shape
    place = along.group * blocks + along.block
    found = np.bincount(place, noisy * along.entries, groups * blocks)
    return found.reshape(groups, blocks)
