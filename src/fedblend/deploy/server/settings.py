# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The rules of a federation's rounds, and what its coordinator is set up with."""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.config.config import Config
from fedblend.core import Algorithm, Key, PyTree, Shard
from fedblend.data.federated import FederatedData, Shards
from fedblend.deploy.transport import Timeouts
from fedblend.metrics import Metric
from fedblend.simulation import aggregators
from fedblend.simulation.engine import Engine
from fedblend.simulation.rounds import Members, Settings, Shapes
from fedblend.simulation.spec import check_needs, weights_of


class BelowQuorum(RuntimeError):
    """Too few clients replied; the server is as it was before the step."""


class RoundRules(NamedTuple):
    """How many clients a round needs, and which replies count."""

    rounds: int
    cohort: int
    every: int = 1
    """Rounds between two measurements."""
    quorum: float = 1.0
    """Fraction of the cohort without which a round is not counted."""
    spare: int = 0
    """Members asked beyond the cohort; the first to reply count."""
    max_update_norm: float | None = None
    """Norm of a client's update beyond which it is rejected."""
    max_extra_norm: float | None = None
    """Norm of all else that a client sends, beyond which it is rejected."""
    max_reply_bytes: int | None = None
    """A longer reply is not read."""
    timeouts: Timeouts = Timeouts()

    @property
    def least(self) -> int:
        """Clients whose replies a round needs."""
        # 0.55 of 20 are 11, and not 11.000000000000002.
        return max(ceil(round(self.quorum * self.cohort, 9)), 1)


def round_rules(config: Config, clients: int, poll: float) -> RoundRules:
    """The rules of a configuration."""
    run, given = config.run, config.federation
    rules = RoundRules(
        rounds=run.rounds,
        cohort=run.cohort or clients,
        every=run.every or max(1, -(-run.rounds // 20)),
        timeouts=Timeouts(poll=poll),
    )
    if given is None:
        return rules
    return rules._replace(
        quorum=given.quorum,
        spare=given.spare,
        max_update_norm=given.longest_update,
        max_extra_norm=given.longest_rest,
        max_reply_bytes=given.largest_answer,
        timeouts=Timeouts(
            given.deadline, given.resend, poll=poll, attempts=given.attempts
        ),
    )


class ServerSetup(NamedTuple):
    """What a coordinator is set up with."""

    engine: Engine
    """With shapes in place of the clients' rows."""
    shapes: Shapes
    request: PyTree
    """Shapes and dtypes of what a client asks for."""
    federated_data: FederatedData
    """The clients' numbers of rows, and no rows."""
    weights: np.ndarray
    experiment: str
    terms: Mapping[str, Any]
    """What nodes get at enrollment."""
    server_key: Key
    """Of the server's own draws; clients need not know it."""
    note: Callable[..., Any]
    """Writes to the audit."""
    metrics: Mapping[str, Metric]
    """What clients measure, by name."""
    alone: dict[str, Any] | None = None
    """How long clients train alone, to compare with."""


def server_setup(
    algorithm: Algorithm,
    params: PyTree,
    counts: Mapping[str, np.ndarray],
    key: Key,
    rules: RoundRules,
    *,
    row: PyTree,
    experiment: str,
    terms: Mapping[str, Any],
    note: Callable[..., Any],
    metrics: Mapping[str, Metric],
    alone: dict[str, Any] | None = None,
    weights: str | None = None,
    reduction: str = "mean",
    trim: float = 0.1,
    central: Shard | None = None,
    server_key: Key | None = None,
) -> ServerSetup:
    """The setup of a coordinator of this algorithm.

    Args:
        algorithm: what to run.
        params: the initial parameters.
        counts: every client's number of rows in each split.
        key: the seed that server and clients share.
        rules: of the rounds.
        row: shapes and dtypes of one example.
        experiment: a name that no other experiment has.
        terms: what nodes get at enrollment.
        note: writes to the audit.
        metrics: what clients measure, by name.
        alone: how long clients train alone, to compare with.
        weights: as in ``simulate``.
        reduction: likewise.
        trim: likewise.
        central: the server's own rows.
        server_key: a seed that clients do not know, for the server's own draws.
    """
    federated_data = FederatedData(
        **{
            name: Shards((), np.zeros(len(rows), np.int64), np.asarray(rows, np.int64))
            for name, rows in counts.items()
        },
        names=(),
    )
    name = algorithm.needs.weights if weights is None else weights
    reducing = aggregators.reduction(reduction, trim)
    lost = float(rules.quorum < 1 or rules.spare > 0)
    clients, capacity = federated_data.clients, federated_data.train.capacity
    check_needs(algorithm, rules.cohort, clients, lost, name, reducing)
    values = weights_of(name, federated_data)
    settings = Settings(
        build=lambda hyper: algorithm,
        capacity=capacity,
        chunk=1,
        everyone=float(values.sum()),
        dropout=0.0,
        reduction=reducing,
    )
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((capacity, *leaf.shape), leaf.dtype), row
    )
    engine = Engine(
        settings,
        key=key,
        over=None,
        params=trees.strongly_typed(params),
        own_params=False,
        examples={"train": rows},
        central=central,
    )
    number, one = jnp.asarray(0, jnp.int32), jnp.asarray(1.0, float)
    count = jnp.asarray(federated_data.train.counts[0], jnp.int32)
    member = Members(number, number, number, count, one, jnp.asarray(True))
    shapes = engine.shapes(member)
    shard = Shard(rows, number, count, number, capacity)
    return ServerSetup(
        engine=engine,
        shapes=shapes,
        request=jax.eval_shape(algorithm.ask, shapes.state, shard),
        federated_data=federated_data,
        weights=values,
        experiment=experiment,
        terms=dict(terms),
        server_key=key if server_key is None else server_key,
        note=note,
        metrics=metrics,
        alone=alone,
    )
