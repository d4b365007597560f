# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Simulating a federation on one machine.

``simulate`` interprets an algorithm's tuple: it compiles blocks of rounds, stores the
clients' states, counts bits, measures, and returns a ``Run``. Progress bars, logs and
checkpoints are consumers of the run: loop over it, a record comes after every block.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.checks import ALGORITHM, COUNT, WHOLE, Instance, optional
from fedblend.core import Algorithm, Key, Needs, PyTree, Shard
from fedblend.data.federated import FEDERATED_DATA, FederatedData, side_by_side
from fedblend.errors import InputError, UserError, shorten
from fedblend.metrics import Measure, Metric, make_metrics
from fedblend.simulation import aggregators, devices, sampling
from fedblend.simulation.aggregators import Reduction
from fedblend.simulation.cohort_loader import CohortLoader
from fedblend.simulation.engine import Engine, Initial
from fedblend.simulation.evaluate import Evaluation, one_for_all
from fedblend.simulation.rounds import Settings
from fedblend.simulation.run import Run
from fedblend.simulation.sampling import Cohort, Strata
from fedblend.simulation.stores.client_store import Storage, make_storage

SERVER_ROWS = Instance(Shard, "a Shard of the server's rows, fb.shard_of(rows)")


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What is simulated, and how: the arguments of ``simulate`` of these names.

    A configuration fills one, ``dataclasses.replace`` makes another of it, and
    ``set_up`` makes it a ``Run``.
    """

    algorithm: Algorithm | Callable[[Any], Algorithm]
    params: PyTree | Callable[[Key], PyTree]
    federated_data: FederatedData | Sequence[FederatedData]
    key: Key
    rounds: int
    cohort: int | Strata | np.ndarray | Cohort | None = None
    central: Shard | None = None
    weights: str | None = None
    chunk: int | None = None
    devices: int | None = None
    every: int | None = None
    store: str | Storage = "auto"
    reduction: str | Reduction = "mean"
    measure: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    measure_on: int | Sequence[int] | None = None
    splits: Sequence[str] | None = None
    local: Run | None = None
    over: PyTree | None = None

    @property
    def federations(self) -> list[FederatedData]:
        """The data of all keys, or of each."""
        given: Any = self.federated_data
        return list(given) if isinstance(given, list | tuple) else [given]


def simulate(
    algorithm: Algorithm | Callable[[Any], Algorithm],
    params: PyTree | Callable[[Key], PyTree],
    federated_data: FederatedData | Sequence[FederatedData],
    key: Key | int,
    *,
    rounds: int,
    cohort: int | Strata | np.ndarray | Cohort | None = None,
    central: Shard | None = None,
    weights: str | None = None,
    chunk: int | None = None,
    devices: int | None = None,
    every: int | None = None,
    store: str | Storage = "auto",
    reduction: str | Reduction = "mean",
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
        params: the initial parameters, a function of a key that draws them, or a
            ``Model``, whose ``init`` draws them.
        federated_data: the clients' data; or for each of several keys one, with the
            same clients and another split of their rows (``federate(..., split=1)``).
        key: the seed, 0 or ``jax.random.key(0)``; an array of keys runs them side by
            side.
        rounds: communication rounds.
        cohort: clients of a round, drawn without replacement; all of them if None.
            ``Cohort`` has other ways to draw them, and clients that do not answer.
        central: the server's own data, for methods that use some.
        weights: "by_count" (training rows) or "uniform"; the algorithm's own choice
            if None.
        chunk: clients trained side by side; all on a GPU, a few on a CPU if None.
        devices: at most so many devices; all that JAX has if None. On a CPU, or with
            ``chunk``, their number does not change a run without replicas.
        every: rounds of a block, after which the run is measured and yields a record;
            a twentieth of all rounds if None.
        store: where client states live: "auto" (the free memory says), "device",
            "host" or "disk"; ``Storage`` also says where rows live, and in which folder
            files are.
        reduction: how answers become one: "mean", "median" or "trimmed_mean", which
            leaves out a tenth at either end; ``trimmed_mean(trim)`` another part.
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
    key, measure = make_key(key), make_metrics(measure)
    # The parameters of this function are the fields of RunSpec.
    spec = RunSpec(**locals())
    try:
        run = set_up(spec)
    except InputError as error:
        raise shorten(error) from error.__cause__
    run.warns = True
    return run


def set_up(spec: RunSpec) -> Run:
    """``simulate``, of its arguments as one value."""
    key, params = spec.key, spec.params
    params = getattr(params, "init", params)  # of a Model
    replicas = _replicas(key, spec.over)
    build, needs = _builder(spec.algorithm, spec.over, replicas)
    federations = spec.federations
    if len(federations) not in (1, key.size):
        allowed = f"a single FederatedData, or one for each of the {key.size} keys"
        said = f"{len(federations)} of them"
        raise UserError("federated_data", spec.federated_data, allowed, said)
    for one in federations:
        FEDERATED_DATA("federated_data", one)
    first, shards = federations[0], side_by_side(federations)
    if spec.central is not None:
        SERVER_ROWS("central", spec.central)
    rounds = WHOLE("rounds", spec.rounds)
    block = max(1, -(-rounds // 20)) if spec.every is None else spec.every
    every = min(COUNT("every", block), max(rounds, 1))
    cohort = sampling.make_cohort(spec.cohort)
    cohorts = sampling.plan_cohorts(cohort, first.clients, needs.secret_cohorts)
    reduction = aggregators.reduction(spec.reduction)
    weights = sampling.client_weights(
        needs,
        first,
        cohorts.size,
        cohorts.strata,
        weights=spec.weights,
        dropout=cohort.dropout,
        reduction=reduction.name,
        sampling=cohort.sampling,
    )
    own_params = callable(params) and bool(key.ndim)
    if not callable(params):
        _check_params(params)
    initial = Initial(params, key, own_params)
    if callable(params):
        _check_params(initial.shapes)
    each = trees.size(initial.shapes) // (len(key) if own_params else 1)
    entries = each * (replicas or 1)
    splits = _splits(spec.splits, first)
    ids = sampling.choose_measured(spec.measure_on, first.clients, key)
    if spec.local is not None:
        Instance(Run, "a Run of local_only")("local", spec.local)
    if spec.local is not None and not np.array_equal(spec.local.measured_ids, ids):
        raise ValueError("local: that run measured other clients than this one does")
    chunk, mesh = devices.share_devices(
        optional(COUNT)("devices", spec.devices),
        replicas,
        optional(COUNT)("chunk", spec.chunk),
        cohorts.most,
        entries,
    )
    settings = Settings(
        build=build,
        capacity=first.train.capacity,
        chunk=chunk,
        everyone=float(weights.rounds.sum()),
        dropout=cohort.dropout,
        reduction=reduction,
        mean_count=float(first.train.counts.mean()),
        random_size=cohort.sampling == "poisson",
    )
    used = {name: shards[name] for name in ("train", *(splits if spec.measure else ()))}
    storage = make_storage(spec.store)
    rows = storage.open_rows(used)
    engine = Engine(
        settings,
        key=key,
        over=spec.over,
        initial=initial,
        examples=rows.examples,
        central=spec.central,
        own_rows=len(federations) > 1,
        replicas=replicas,
        mesh=mesh,
        rounds=rounds,
    )
    evaluation = Evaluation(
        metrics=spec.measure,
        splits={name: shards[name] for name in splits},
        ids=ids,
        replicas=replicas,
        most=settings.chunk,
        one_for_all=rows.kind == "device"
        and one_for_all(build(trees.take(spec.over, 0))),
    )
    clients = CohortLoader(
        engine,
        rows,
        used,
        weights,
        cohort=cohorts.most,
        every=every,
        storage=storage,
    )
    return Run(
        engine,
        first,
        clients,
        cohorts,
        evaluation,
        rounds=rounds,
        every=every,
        local=spec.local,
    )


def _check_params(params: PyTree) -> None:
    """Refuse initial parameters that have no gradient."""
    kinds = [getattr(leaf, "dtype", type(leaf)) for leaf in jax.tree.leaves(params)]
    if not kinds or not all(jnp.issubdtype(kind, jnp.floating) for kind in kinds):
        allowed = "a tree of arrays of floats, a Model, or a function of a key"
        raise UserError("params", params, allowed)


def make_key(key: Any) -> Key:
    """The key, or that of a seed; what is neither is refused."""
    if isinstance(key, int | np.integer):
        return jax.random.key(WHOLE("key", key))
    typed = isinstance(key, jax.Array) and jnp.issubdtype(
        key.dtype, jax.dtypes.prng_key
    )
    if not typed:
        raise ValueError(
            f"key: {type(key).__name__} is not a key of JAX or a seed; write "
            "jax.random.key(0), or 0"
        )
    return key


def _splits(asked: Sequence[str] | None, federated_data: FederatedData) -> list[str]:
    """The splits to measure on."""
    if isinstance(asked, str):
        raise UserError("splits", asked, "a list of names of splits")
    names = list(federated_data.splits) if asked is None else list(asked)
    for name in names:
        if name not in federated_data.splits:
            raise ValueError(
                f"splits: {name!r} is not one of {', '.join(federated_data.splits)}"
            )
    return names


def _builder(
    algorithm: Any, over: PyTree | None, replicas: int | None
) -> tuple[Callable[[Any], Algorithm], Needs]:
    """From a swept value to an algorithm, and what the first algorithm needs.

    The algorithms of a sweep are all built, and so checked, by value.
    """
    if isinstance(algorithm, Algorithm):
        return lambda hyper: algorithm, algorithm.needs
    if not callable(algorithm):
        raise UserError("algorithm", algorithm, "an Algorithm, or a function with over")
    if over is None:
        raise ValueError("algorithm: a builder needs `over`, the values to build for")
    build = cast(Callable[[Any], Algorithm], algorithm)
    every = [build(trees.take(over, replica)) for replica in range(replicas or 0)]
    for one in every:
        ALGORITHM("algorithm: what it builds", one)
    return build, every[0].needs


def _replicas(key: Key, over: PyTree | None) -> int | None:
    """The number of replicas, or None for a plain run."""
    leaves = jax.tree.leaves(over)
    if over is not None and not all(np.ndim(leaf) and len(leaf) for leaf in leaves):
        raise UserError("over", over, "a tree of arrays with an entry for each run")
    sizes = {len(leaf) for leaf in leaves}
    if key.ndim:
        sizes.add(len(key))
    if len(sizes) > 1:
        raise ValueError(f"over: lengths {sorted(sizes)} of the sweep's axes differ")
    return sizes.pop() if sizes else None
