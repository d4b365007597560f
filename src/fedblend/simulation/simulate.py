# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Simulating a federation on one machine.

``simulate`` interprets an algorithm's tuple: it compiles blocks of rounds, keeps the
clients' states, counts bits, measures, and hands out a ``Run``. Progress bars, logs and
checkpoints are consumers of the run: loop over it, a record comes after every block.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.checks import COUNT, PART, WHOLE, Number, fits, optional, words
from fedblend.core import Algorithm, Key, PyTree, Shard
from fedblend.data.federated import FEDERATED_DATA, FederatedData, side_by_side
from fedblend.errors import UserError
from fedblend.metrics import Measure, Metric, as_metrics
from fedblend.simulation import aggregators
from fedblend.simulation.client_calls import strong
from fedblend.simulation.engine import Engine
from fedblend.simulation.evaluate import Evaluation
from fedblend.simulation.rounds import Settings
from fedblend.simulation.run import Run
from fedblend.simulation.sampling import (
    Strata,
    check,
    check_epoch,
    cohorts,
    settled,
    weighed,
)

CPU_CHUNK, CPU_ENTRIES = 20, 2**20
"""Clients trained side by side on a CPU: so many, while their parameters together have
no more entries than that; docs/benchmarks.md has the measurement."""
_MEASURED = Number(least=0, whole=True, clients=True, each="the ids of some clients")
MEASURE_AT_MOST = 10_000
"""Federations up to this size are measured whole, of larger ones a sample of 1000."""


def simulate(
    algorithm: Algorithm | Callable[[Any], Algorithm],
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData | Sequence[FederatedData],
    key: Key,
    *,
    rounds: int,
    cohort: int | Strata | np.ndarray | None = None,
    epoch: int | None = None,
    central: Shard | None = None,
    weights: str | None = None,
    chunk: int | None = None,
    every: int | None = None,
    store: str = "auto",
    store_folder: Path | None = None,
    dropout: float = 0.0,
    reduction: str = "mean",
    trim: float = 0.1,
    measure: Mapping[str, Metric | Measure] | None = None,
    measure_on: int | Sequence[int] | None = None,
    splits: Sequence[str] | None = None,
    local: Run | None = None,
    over: PyTree | None = None,
) -> Run:
    """Set up a run; it starts when it is looped over, or asked for results.

    Args:
        algorithm: what to run; with ``over``, a function from one of its entries (a
            traced number, or a tree of them) to an algorithm.
        params: the initial parameters, or a function of a key that draws them.
        federated_data: the clients' data; or for each of several keys one, with the
            same clients and another split of their rows (``federate(..., split=1)``).
        key: the seed, ``jax.random.key(0)``; an array of keys runs them side by side.
        rounds: communication rounds.
        cohort: clients of a round, drawn without replacement; all of them if None.
            ``Strata`` draws so many of each of several populations; an array of ids has
            these clients in every round.
        epoch: rounds in which nobody takes part twice: clients are dealt, in another
            order in each epoch. Every round draws anew if None.
        central: the server's own data, for methods that use some.
        weights: "by_count" (training rows) or "uniform"; the algorithm's own choice
            if None.
        chunk: clients trained side by side; all on a GPU, a few on a CPU if None.
        every: rounds of a block, after which the run is measured and yields a record;
            a twentieth of all rounds if None.
        store: where client states live: "auto", "device", "host" or "disk".
        store_folder: where the disk store puts its files; a temporary place if None.
        dropout: probability that a member of the cohort is not heard.
        reduction: "mean", "median" or "trimmed_mean" (which leaves out the fraction
            ``trim`` at either end).
        trim: see ``reduction``.
        measure: metrics by name, see ``metrics``; nothing is measured if None.
        measure_on: ids of clients, or the size of a fixed sample of them; if None all
            of them, or 1000 where there are more than 10,000.
        splits: which of train, validation and test to measure on; all there are.
        local: a run of ``local_only`` on the same clients, to compare each with; see
            ``train_alone``.
        over: a tree of arrays whose first axis is a sweep, run side by side.

    Returns:
        A ``Run``. With several keys or ``over`` its results have a replica for each.
    """
    build = _builder(algorithm, over)
    _check_key(key)
    replicas = _replicas(key, over)
    federations: list[Any] = [federated_data]
    if isinstance(federated_data, list | tuple):
        federations = list(federated_data)
    if len(federations) not in (1, key.size):
        allowed = f"a single FederatedData, or one for each of the {key.size} keys"
        said = f"{len(federations)} of them"
        raise UserError("federated_data", federated_data, allowed, said)
    for one in federations:
        FEDERATED_DATA("federated_data", one)
    first: FederatedData = federations[0]
    shards = side_by_side(federations)
    clients = first.clients
    always = None
    if isinstance(cohort, np.ndarray):
        always = np.sort(_checked_ids(cohort, "cohort", clients))
        cohort = len(always)
    strata, cohort = settled(cohort, clients)
    cohort, rounds = _members(cohort, clients), WHOLE("rounds", rounds)
    block: int = COUNT("every", max(1, -(-rounds // 20)) if every is None else every)
    chunk = optional(COUNT)("chunk", chunk)
    epoch = Number(whole=True, optional=True)("epoch", epoch)
    PART("dropout", dropout)
    words("auto", "device", "host", "disk")("store", store)
    if epoch is not None:
        check_epoch(epoch, strata, clients, cohort)
    reducing = aggregators.reduction(reduction, trim)
    example = _each_built(build, over, replicas)[0]
    weights = example.needs.weights if weights is None else weights
    check_needs(example, cohort, clients, dropout, weights, reducing)
    values = weights_of(weights, first)
    joining = values
    if strata is not None:
        check(strata, example.needs, reducing.name)
        joining, values = weighed(strata, values)
    own_params = callable(params) and bool(key.ndim)
    if callable(params):
        params = jax.vmap(params)(key) if own_params else params(key)
    params = strong(params)
    size = trees.size(params) // (len(key) if own_params else 1)
    settings = Settings(
        build=build,
        capacity=first.train.capacity,
        chunk=_chunk(chunk, cohort, size * (replicas or 1)),
        everyone=float(values.sum()),
        dropout=dropout,
        reduction=reducing,
    )
    names = list(first.splits) if splits is None else list(splits)
    metrics = as_metrics(measure)
    _check_names(names, first)
    on = measured_ids(measure_on, clients, key)
    if local is not None and not np.array_equal(local.measured_ids, on):
        raise ValueError("local: that run measured other clients than this one does")
    engine = Engine(
        settings,
        key=key,
        over=over,
        params=params,
        own_params=own_params,
        examples={
            name: jax.tree.map(jnp.asarray, shards[name].examples)
            for name in ("train", *(names if metrics else ()))
        },
        central=central,
        own_rows=len(federations) > 1,
    )
    measuring = Evaluation(
        engine,
        metrics=metrics,
        splits={name: shards[name] for name in names},
        ids=on,
        replicas=replicas,
        local=local,
    )
    return Run(
        engine,
        first,
        shards["train"],
        replicas=replicas,
        rounds=rounds,
        cohort=cohort,
        strata=strata,
        epoch=epoch,
        always=always,
        every=min(block, max(rounds, 1)),
        weights=(joining, values),
        store=(store, store_folder),
        measuring=measuring,
    )


def _check_key(key: Any) -> None:
    typed = isinstance(key, jax.Array) and jnp.issubdtype(
        key.dtype, jax.dtypes.prng_key
    )
    if not typed:
        raise ValueError(
            f"key: {type(key).__name__} is not a key of JAX; write jax.random.key(0)"
        )


def _members(cohort: int, clients: int) -> int:
    """The size of a cohort, checked."""
    cohort = Number(whole=True)("cohort", cohort)
    if not 1 <= cohort <= clients:
        allowed = f"between 1 and the {clients} clients there are"
        raise UserError("cohort", cohort, allowed)
    return cohort


def _check_names(splits: list[str], federated_data: FederatedData) -> None:
    for name in splits:
        if name not in federated_data.splits:
            raise ValueError(
                f"splits: {name!r} is not one of {', '.join(federated_data.splits)}"
            )


def _builder(algorithm, over: PyTree | None) -> Callable[[Any], Algorithm]:
    if isinstance(algorithm, Algorithm):
        return lambda hyper: algorithm
    if not callable(algorithm):
        raise UserError("algorithm", algorithm, "an Algorithm, or a function with over")
    if over is None:
        raise ValueError("algorithm: a builder needs `over`, the values to build for")
    return cast(Callable[[Any], Algorithm], algorithm)


def _each_built(
    build: Callable[[Any], Algorithm], over: PyTree | None, replicas: int | None
) -> list[Algorithm]:
    """The algorithms of a sweep's entries, each checked by value as none is later."""
    if over is None:
        return [build(None)]
    return [build(trees.take(over, replica)) for replica in range(replicas or 0)]


def _replicas(key: Key, over: PyTree | None) -> int | None:
    """The number of replicas, or None for a plain run."""
    sizes = {len(leaf) for leaf in jax.tree.leaves(over)}
    if key.ndim:
        sizes.add(len(key))
    if len(sizes) > 1:
        raise ValueError(f"over: lengths {sorted(sizes)} of the sweep's axes differ")
    return sizes.pop() if sizes else None


def check_needs(algorithm, cohort, clients, dropout, weights, reducing) -> None:
    """Refuse, in one line, what an algorithm cannot be run with."""
    needs = algorithm.needs
    fits(needs, clients)
    if needs.everyone and (cohort < clients or dropout > 0):
        raise ValueError(
            f"cohort: this algorithm needs all {clients} clients in every round, "
            f"not {cohort} with dropout {dropout:g}"
        )
    if needs.mean and reducing.stacked is not None:
        raise ValueError(
            f"reduction: {reducing.name!r} breaks this algorithm, whose server keeps "
            "the mean of the clients' memories, or counts on a mean; it needs 'mean'"
        )
    if needs.cohort not in (None, cohort):
        raise ValueError(
            f"cohort: this algorithm was built for {needs.cohort} clients in a round, "
            f"not {cohort}"
        )
    if needs.uniform and weights != "uniform":
        raise ValueError(f"weights: this algorithm needs 'uniform', not {weights!r}")


def weights_of(name: str, federated_data: FederatedData) -> np.ndarray:
    """Every client's weight in the mean."""
    if words("by_count", "uniform")("weights", name) == "uniform":
        return np.ones(federated_data.clients)
    return federated_data.train.counts.astype(float)


def _chunk(chunk: int | None, cohort: int, size: int) -> int:
    """How many clients to map at once; chunks of a cohort are as even as can be."""
    if chunk is None and jax.default_backend() == "cpu":
        chunk = min(max(CPU_ENTRIES // max(size, 1), 1), CPU_CHUNK)
    elif chunk is None:
        chunk = cohort
    pieces = -(-cohort // min(chunk, cohort))
    return -(-cohort // pieces)


def measured_ids(measure_on, clients: int, key: Key) -> np.ndarray:
    """The clients that are measured, see ``measure_on`` of ``simulate``."""
    if measure_on is None:
        measure_on = clients if clients <= MEASURE_AT_MOST else 1000
    ids = _MEASURED("measure_on", measure_on)
    if isinstance(ids, int):
        if not 1 <= ids <= clients:
            raise UserError("measure_on", ids, f"between 1 and the {clients} clients")
        root = keys.named(key if key.ndim == 0 else key[0], "measure_on")
        return cohorts(root, [0], clients, ids)[0]
    return _checked_ids(ids, "measure_on", clients)


def _checked_ids(ids: Any, name: str, clients: int) -> np.ndarray:
    ids = np.asarray(ids, np.int64)
    if not ids.size or ids.min() < 0 or ids.max() >= clients:
        raise UserError(name, ids, f"made of ids between 0 and {clients - 1}")
    if len(np.unique(ids)) < len(ids):
        raise ValueError(f"{name}: {ids.tolist()} has the same client twice")
    return ids
