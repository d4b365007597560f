# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The rules of a federation's rounds, and what its coordinator is set up with."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.config.config import Config
from fedblend.config.tables.federation import Federation
from fedblend.core import Algorithm, Key, PyTree, Shard
from fedblend.data.federated import FederatedData, Shards
from fedblend.metrics import Metric
from fedblend.simulation import aggregators
from fedblend.simulation.engine import Engine, Initial
from fedblend.simulation.rounds import Members, Settings
from fedblend.simulation.sampling import client_weights
from fedblend_federation.secure.flatten import coarse
from fedblend_federation.transport import Timeouts


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
    longest_update: float | None = None
    """Norm of a client's update beyond which it is rejected."""
    longest_rest: float | None = None
    """Norm of all else that a client sends, beyond which it is rejected."""
    largest_answer: int | None = None
    """Bytes; a longer reply is not read."""
    norm_ratio: float | None = 100.0
    """A client's update may be so many times as long as the median one; see
    ``aggregation.NormHistory``."""
    clip_ratio: float | None = None
    """A longer change of the model is clipped to so many times the median one."""
    weight_ratio: float | None = 3.0
    """A client may weigh so many times as much as the median one, whatever number of
    rows it claims."""
    timeouts: Timeouts = Timeouts()

    @property
    def least(self) -> int:
        """Clients whose replies a round needs."""
        return fraction_of(self.quorum, self.cohort)


def fraction_of(quorum: float, clients: int) -> int:
    """The least number of clients that is such a fraction of them."""
    # 0.55 of 20 are 11, and not 11.000000000000002.
    return max(ceil(round(quorum * clients, 9)), 1)


def round_rules(config: Config, clients: int, poll: float) -> RoundRules:
    """The rules of a configuration, for so many clients that take part."""
    run, given = config.run, (config.federation or Federation()).model_dump()
    for name in ("max_rows", "secure", "secure_bits", "secure_clip"):
        del given[name]  # of descriptions, and of sums
    if config.privacy is not None:
        # Whom the median of norms rejects or clips depends on the rows of others, so
        # that one client could move the sum by more than its own update.
        given["norm_ratio"] = given["clip_ratio"] = None
    times = {name: given.pop(name) for name in ("deadline", "resend", "attempts")}
    return RoundRules(
        rounds=run.rounds,
        cohort=min(run.cohort or clients, clients),
        every=run.every or max(1, -(-run.rounds // 20)),
        timeouts=Timeouts(poll=poll, **times),
        **given,
    )


class SecureSums(NamedTuple):
    """How sums are secure; see ``secure.fixed_point`` for both numbers."""

    folder: Path
    """Where the server writes what it has asked of nodes, before it asks."""
    bits: int = 64
    clip: float = 65536.0


def secure_sums(config: Config, folder: Path) -> SecureSums | None:
    """How sums are secure by a configuration; None where they are not."""
    given = config.federation or Federation()
    if not given.secure:
        return None
    return SecureSums(folder, given.secure_bits, given.secure_clip)


class ServerSetup(NamedTuple):
    """What a coordinator is set up with."""

    experiment: str
    """A name that no other experiment has."""
    algorithm: Algorithm
    params: PyTree
    """The initial parameters."""
    counts: Mapping[str, np.ndarray]
    """Every client's number of rows in each split."""
    row: PyTree
    """Shapes and dtypes of one example."""
    key: Key
    """The seed that server and clients share."""
    metrics: Mapping[str, Metric]
    """What clients measure, by name."""
    note: Callable[..., Any]
    """Writes to the audit."""
    terms: Mapping[str, Any] = {}
    """What nodes get at enrollment."""
    weights: str | None = None
    """As in ``simulate``; so are ``reduction`` and ``trim``."""
    reduction: str = "mean"
    trim: float = 0.1
    central: Shard | None = None
    """The server's own rows."""
    alone: dict[str, Any] | None = None
    """How long clients train alone, to compare with."""
    absent: Sequence[int] = ()
    """Clients that take no part."""
    names: Mapping[int, str] = {}
    """What the nodes of the clients are called, for messages to people."""
    secure: SecureSums | None = None
    """How sums are secure; the server sees every client's answer if None."""


def rowless_data(counts: Mapping[str, np.ndarray]) -> FederatedData:
    """The clients' numbers of rows, and no rows.

    Absent clients have none, which a simulation does not know: here they have one, and
    no weight.
    """
    least = {"train": 1}
    splits = {
        name: Shards(
            (),
            np.zeros(len(rows), np.int64),
            np.maximum(np.asarray(rows, np.int64), least.get(name, 0)),
        )
        for name, rows in counts.items()
    }
    held_out = {name: splits.get(name) for name in ("validation", "test")}
    return FederatedData(splits["train"], held_out["validation"], held_out["test"])


def rowless_engine(
    setup: ServerSetup, rules: RoundRules, federated_data: FederatedData
) -> tuple[Engine, np.ndarray]:
    """The simulator's functions with shapes in place of rows; the clients' weights."""
    algorithm = setup.algorithm
    reduction = aggregators.reduction(setup.reduction, setup.trim)
    lost = float(rules.quorum < 1 or rules.spare > 0)
    claimed = client_weights(
        algorithm.needs,
        federated_data,
        rules.cohort,
        weights=setup.weights,
        dropout=lost,
        reduction=reduction.name,
    ).rounds
    weights = _limit_weights(claimed, setup, rules)
    capacity = federated_data.train.capacity
    settings = Settings(
        build=lambda hyper: algorithm,
        capacity=capacity,
        chunk=1,
        everyone=float(weights.sum()),
        dropout=0.0,
        reduction=reduction,
    )
    engine = Engine(
        settings,
        key=setup.key,
        over=None,
        initial=Initial(setup.params, setup.key, each=False),
        examples={"train": trees.shapes(setup.row, capacity)},
        central=setup.central,
        own_rows=False,
        replicas=None,
        rounds=rules.rounds,
    )
    return engine, weights


def _limit_weights(
    claimed: np.ndarray, setup: ServerSetup, rules: RoundRules
) -> np.ndarray:
    """The clients' weights: none of absent clients, none far above the median.

    Nodes whose answers are summed unseen give themselves coarse ones.
    """
    weights = claimed.copy()
    weights[list(setup.absent)] = 0.0
    if setup.secure is not None:
        weights = coarse(weights)
    if rules.weight_ratio is None:
        return weights
    most = rules.weight_ratio * np.median(weights[weights > 0])
    for client in np.flatnonzero(weights > most).tolist():
        setup.note("weight limited", client=client, rows=weights[client], counted=most)
    return np.minimum(weights, most)


def first_member(federated_data: FederatedData) -> Members:
    """The first client as a member of a cohort, for shapes."""
    number, one = jnp.asarray(0, jnp.int32), jnp.asarray(1.0, float)
    count = jnp.asarray(federated_data.train.counts[0], jnp.int32)
    return Members(number, number, number, count, one, jnp.asarray(True))
