# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models for clients that join after the training.

A new client enrolls at the shared model and takes part in rounds of its own: the
message stays the same, its answers are thrown away, only its state changes. Then it
deploys the algorithm's personal model::

    client_i <- enroll(shared, shard_i)
    visits times:  client_i <- client(down, client_i, shard_i)
    personal_i <- personal(down, client_i, shard_i)

Methods that train a client's own model against the message (Ditto, MAPPER, FedRep,
training alone) may do any local work in a visit; methods that fine-tune in ``personal``
or find their model in ``enroll`` (FLIX) need no visits. APFL moves its copy of the
shared model within a round: only with one local step a visit the shared model stays as
it is, and then this is equation (17) of its paper. A method with one model for all
clients (``fedavg``) is wrapped in ``finetune`` first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.checks import WHOLE, fits
from fedblend.core import Algorithm, Down, Key, PyTree, Shard
from fedblend.data.federated import FEDERATED_DATA, FederatedData, Shards
from fedblend.metrics import Measure, Metric, make_metrics
from fedblend.simulation import compile
from fedblend.simulation.evaluate import evaluate_client, message_to_deploy
from fedblend.simulation.result import plain, spreads
from fedblend.stats.gains import Evidence, Measured, harms

AT_ONCE = 20
"""Clients that are trained side by side; bounds the memory it takes."""


class NewClients(NamedTuple):
    """Clients that joined, their models, and what these are worth.

    ``models`` are stacked over clients; ``measured`` has, for each split, the measures
    of the "shared" and of the "personal" model over clients, ``by_row`` what each row
    brings to them.
    """

    federated_data: FederatedData
    models: PyTree
    measured: Measured
    by_row: Measured
    metrics: Mapping[str, Metric]

    def personal(self, client: int) -> PyTree:
        """The model of one of them: parameters, or a ``Blend``."""
        return trees.take(self.models, client)

    @property
    def evidence(self) -> Evidence:
        """What was measured, for comparing models client by client."""
        splits = self.federated_data.splits
        counts = {name: splits[name].counts for name in self.measured}
        everybody = np.arange(self.federated_data.clients)
        numbers = {name: splits[name].numbers(everybody) for name in self.by_row}
        return Evidence([self.measured], [self.by_row], counts, self.metrics, numbers)

    def summary(self) -> dict[str, Any]:
        """The metrics of the models over clients, and whom they harm."""
        evidence = self.evidence
        return {
            "clients": self.federated_data.clients,
            "measures": plain(spreads(self.measured, evidence.counts, self.metrics)),
            "harmed": harms(evidence),
        }


def personalize(
    algorithm: Algorithm,
    down: Down,
    new_clients: FederatedData,
    key: Key,
    *,
    visits: int = 1,
    measure: Mapping[str, Metric | Measure] | None = None,
    splits: Sequence[str] | None = None,
) -> NewClients:
    """Give clients that were not there in training a model each.

    Args:
        algorithm: what they do. Settings given as arrays over clients are read by the
            new clients' own ids, so give numbers.
        down: the server's message, ``run.down`` of a plain run; it is not changed.
        new_clients: their data.
        key: the seed, ``jax.random.key(0)``.
        visits: how often each of them runs the client's half of a round.
        measure: metrics by name, see ``metrics``; nothing is measured if None.
        splits: on which splits, all there are if None.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, _ = fb.datasets.quadratics(clients=8, dim=2)
        >>> seen, unseen = fb.data.split_clients(federation, 0.25)
        >>> loss = fb.datasets.quadratic_loss
        >>> algorithm = fb.apfl(loss, fb.Work(0.1, steps=1, batch_size=None), alpha=0.5)
        >>> run = fb.simulate(algorithm, jnp.zeros(2), seen, jax.random.key(0),
        ...                   rounds=50).complete()
        >>> joined = fb.personalize(algorithm, run.down, unseen, jax.random.key(0),
        ...                         visits=20,
        ...                         measure={"loss": fb.metrics.mean_loss(loss)})
        >>> losses = joined.measured["train"]
        >>> bool((losses["personal"]["loss"] < losses["shared"]["loss"]).all())
        True
    """
    FEDERATED_DATA("new_clients", new_clients)
    visits = WHOLE("visits", visits)
    fits(algorithm.needs, new_clients.clients, new_clients=True)
    down, metrics = trees.strongly_typed(down), make_metrics(measure)
    train = new_clients.train

    def model_of(down, key, shard):
        own = keys.derive(key, "newcomer", 0, shard.id)
        _, state = trees.strongly_typed(algorithm.enroll(down.shared, shard, own))

        def visit(number, state):
            own = keys.derive(key, "newcomer", number + 1, shard.id)
            message = algorithm.wire.tell(down, algorithm.wire.ask(state, shard))
            return algorithm.client(message, state, shard, own)[1]

        if visits:
            state = jax.lax.fori_loop(0, visits, visit, state)
        own = keys.derive(key, "newcomer", visits + 1, shard.id)
        message = message_to_deploy(algorithm, down, state, shard)
        return algorithm.personal(message, state, shard, own)

    models = _map_clients(model_of, (down, key), train, ())
    names = list(new_clients.splits) if splits is None else splits
    measured, by_row = {}, {}
    for name in names if metrics else ():
        split = new_clients.splits[name]

        def score_client(shared, shard, personal, name=name):
            return evaluate_client(algorithm, metrics, personal, shared, {name: shard})

        found = _map_clients(score_client, (down.shared,), split, (models,))
        numbers, rows = jax.tree.map(np.asarray, found)
        measured |= numbers
        by_row |= rows
    return NewClients(new_clients, models, measured, by_row, metrics)


def _map_clients(
    function: Callable, fixed: tuple, split: Shards, each: tuple
) -> PyTree:
    """``function(*fixed, shard, *entries of each)`` of all clients, compiled."""
    numbers = (split.starts, split.counts, np.arange(len(split.counts)))
    places = tuple(jnp.asarray(values, jnp.int32) for values in numbers)
    examples = jax.tree.map(jnp.asarray, split.examples)

    def all_of_them(fixed, examples, places, each):
        def one(this):
            (start, count, id), *own = this
            shard = Shard(examples, start, count, id, split.capacity)
            return function(*fixed, shard, *own)

        return jax.lax.map(one, (places, *each), batch_size=AT_ONCE)

    return compile.jit(all_of_them, 0)(fixed, examples, places, each)
