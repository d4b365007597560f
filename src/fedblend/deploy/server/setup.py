# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Setting up a server, from the method and what the nodes said of themselves."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, Key, PyTree, Shard
from fedblend.data.federated import FederatedData, Shards
from fedblend.deploy.server.settings import RoundRules, Setting
from fedblend.metrics import Metric
from fedblend.simulation import aggregators
from fedblend.simulation.engine import Engine
from fedblend.simulation.rounds import Settings
from fedblend.simulation.spec import check_needs, weights_of


def rowless(counts: Mapping[str, np.ndarray], names: tuple[str, ...]) -> FederatedData:
    """A federation of which only the numbers of rows are known."""
    splits = {
        name: Shards((), np.zeros(len(held), np.int64), np.asarray(held, np.int64))
        for name, held in counts.items()
    }
    return FederatedData(**splits, names=names)


def setting(
    algorithm: Algorithm,
    params: PyTree,
    federated_data: FederatedData,
    key: Key,
    rules: RoundRules,
    *,
    row: PyTree,
    experiment: str,
    terms: Mapping[str, Any],
    note: Callable[..., Any],
    metrics: Mapping[str, Metric],
    weights: str | None = None,
    reduction: str = "mean",
    trim: float = 0.1,
    central: Shard | None = None,
    server_key: Key | None = None,
) -> Setting:
    """What a server of this algorithm needs.

    Args:
        algorithm: what to run.
        params: the initial parameters.
        federated_data: the clients' numbers of rows, see ``rowless``.
        key: the seed that server and clients share.
        rules: how it is led.
        row: shapes and dtypes of one example.
        experiment: a name that no other experiment has.
        terms: what nodes are told when they are enrolled.
        note: writes to the audit log.
        metrics: what clients measure, by name.
        weights: as in ``simulate``.
        reduction: likewise.
        trim: likewise.
        central: the server's own rows.
        server_key: a seed that clients do not know, for the server's own draws.
    """
    clients = federated_data.clients
    name = algorithm.needs.weights if weights is None else weights
    reducing = aggregators.reduction(reduction, trim)
    lost = float(rules.quorum < 1 or rules.spare > 0)
    check_needs(algorithm, rules.cohort, clients, lost, name, reducing)
    values = weights_of(name, federated_data)
    capacity = federated_data.train.capacity
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
    own = key if server_key is None else server_key
    return Setting(
        engine,
        federated_data,
        values,
        experiment,
        dict(terms),
        own,
        note,
        metrics,
    )
