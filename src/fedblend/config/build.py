# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a configuration to what ``simulate`` takes: data, model, loss, algorithm.

L_i, and the rates that theory allows, come from the training rows of the clients, so
that they differ between seeds with splits of their own. Such seeds run side by side all
the same: the simulator sweeps over their constants.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.algorithms.local_only import local_only
from fedblend.checks import matches
from fedblend.config import theory_rates
from fedblend.config.config import Config
from fedblend.config.table import NO_VALUES, Values, check_lists, values_inside
from fedblend.config.tables import central, compress, data, privacy
from fedblend.config.tables.measure import measures_of
from fedblend.config.tables.model import (
    loss_name,
    losses_of,
    model_of,
    name_parts,
    reads_ranks,
    smoothness,
)
from fedblend.config.tables.run import strata
from fedblend.config.theory_rates import (
    asks_for_constants,
    choose_steps,
    rates,
    theory_values,
)
from fedblend.core import Algorithm, Key, Loss, Needs, PyTree
from fedblend.data.dataset import Dataset, Task, task_of
from fedblend.data.federated import FederatedData
from fedblend.errors import ConfigError
from fedblend.models import Model
from fedblend.simulation.aggregators import reduction
from fedblend.simulation.sampling import Cohort, complete_strata
from fedblend.simulation.simulate import RunSpec
from fedblend.simulation.stores.client_store import Storage
from fedblend.theory.constants import Smoothness
from fedblend.trees import leaves_by_path

if TYPE_CHECKING:
    from fedblend.config.tables.privacy import ProtectRows
    from fedblend.data.preprocess.preprocessing import Preprocessing
    from fedblend.metrics import Metric
    from fedblend.transforms.row_noise import RowNoise

_SIMULATED = {"rounds", "every", "weights", "chunk", "devices"}
"""The keys of [run] that are fields of ``RunSpec``."""


class Method(NamedTuple):
    """What is computed, on any rows."""

    model: Model
    loss: Loss
    algorithm: Algorithm
    local: Algorithm | None
    """Training alone with the same local work, if it is to be compared with."""
    measures: "Mapping[str, Metric]"
    smoothness: Smoothness | None
    """The constants of f_i, where the algorithm asks for them and they are known."""
    local_at: Callable[[Any], Algorithm] | None = None
    """Training alone with its rate times a factor, where that rate is tuned."""
    hidden: "RowNoise | None" = None
    """The loss that the algorithm trains on, where noise hides rows."""


class BySplit(NamedTuple):
    """What is computed where numbers differ by replica, as constants do by split.

    The algorithms are functions of an entry of ``over``, as ``simulate`` takes them.
    """

    algorithm: Callable[[Any], Algorithm]
    local: Callable[[Any], Algorithm] | None
    over: Any


class Built(NamedTuple):
    """A configuration, ready to be simulated."""

    federated_data: FederatedData
    """The clients, their rows as the first of the seeds splits them."""
    model: Model
    loss: Loss
    algorithm: Algorithm
    local: Algorithm | None
    measures: "Mapping[str, Metric]"
    key: Key
    spec: RunSpec
    """What is simulated, and how."""
    facts: dict[str, Any]
    """What identifies the data: name, rows, sha256 of rows and of the partition."""
    warnings: tuple[str, ...]
    task: Task
    federations: Sequence[FederatedData]
    """The same clients with the split of each seed, or of all of them."""
    constants: Sequence[Smoothness | None] = (None,)
    """Those of f_i in each split, where the algorithm asks for them."""
    unseen: Sequence[FederatedData] = ()
    """Clients that take no part in the training, in the same splits."""
    by_split: BySplit | None = None
    """Instead of ``algorithm`` and ``local``, where splits differ in constants."""
    server: FederatedData | None = None
    """The server's own rows, where it has some."""
    smoothness: Smoothness | None = None
    """The constants of f_i, where the algorithm asks for them and they are known."""
    local_at: Callable[[Any], Algorithm] | None = None
    """Training alone with its rate times a factor, where that rate is tuned."""
    hidden: "RowNoise | None" = None
    """The loss that the algorithm trains on, where noise hides rows."""

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return trees.size(jax.eval_shape(self.model.init, jax.random.key(0)))

    @property
    def preprocessing(self) -> "tuple[Preprocessing, ...]":
        """Of a raw table, one for each of ``federations``; else none."""
        fitted = (one.preprocessing for one in self.federations)
        return tuple(one for one in fitted if one is not None)


def build(config: Config, whole: Dataset | None = None) -> Built:
    """Load and share out the data, and build all that is computed with.

    Args:
        config: what to run.
        whole: the data, in place of what ``[data]`` would load.

    Raises:
        ConfigError: what the configuration asks for does not go together.
        DataError: the data cannot be had, or cannot be used.
    """
    whole = whole or data.load_dataset(config.data)
    if whole.schema is not None:
        schema = whole.schema._replace(ranks=reads_ranks(config))
        whole = whole._replace(schema=schema)
    task = task_of(whole)
    dataset, server, target = whole, None, config.data.target
    if config.central is not None:
        dataset, server = central.set_aside(
            config.central, whole, target, config.data.seed
        )
    parts = data.share_out(config.data, dataset)
    splits = data.splits_of(config.data, config.run.seed)
    federations, unseen = data.hold_out(config.data, dataset, parts, splits)
    if config.central is not None and whole.schema is not None:
        server = central.preprocess_server(
            config.central, server, whole, target, config.data.seed, federations
        )
    federated_data = federations[0]
    clients = federated_data.clients
    drawn = strata(config.populations, federated_data) or config.run.cohort
    method_with = partial(
        method, config, task, clients, complete_strata(drawn, clients)[1]
    )
    name = loss_name(config, task)
    known: list[Smoothness | None] = [None]
    if asks_for_constants(config):
        known = [smoothness(config.model, name, one) for one in federations]
    shapes = jax.eval_shape(model_of(config, task).init, jax.random.key(0))
    dim, by_split = trees.size(shapes), None
    if config.algorithm.steps == "theory":
        config = choose_steps(config, known[0], dim)
        method_with = partial(method, config, *method_with.args[1:])
    found = method_with(known[0])
    if over := stack_constants(known):
        if config.algorithm.rate == "theory":
            over["rates"] = np.array([rates(config, one, dim) for one in known])
        alone = found.local is not None
        by_split = vary_by_replica(method_with, known[0], over, alone)
    given = found.smoothness
    if config.algorithm.entry.coin and given is None:
        given = smoothness(config.model, name, federated_data)
    key, run = _key(config.run.seed), config.run
    return Built(
        federated_data=federated_data,
        **found._asdict(),
        key=key,
        spec=RunSpec(
            algorithm=found.algorithm if by_split is None else by_split.algorithm,
            params=found.model.init,
            federated_data=federations,
            key=key,
            **run.model_dump(include=_SIMULATED),
            cohort=Cohort(drawn, run.epoch, run.separation, run.sampling, run.dropout),
            store=Storage(run.store, run.rows),
            reduction=reduction(run.reduction, run.trim),
            central=None if server is None else server.train.shard(0),
            measure=found.measures,
            measure_on=config.measure.on,
            splits=config.measure.splits,
            over=None if by_split is None else by_split.over,
        ),
        facts=data.facts(whole, parts, splits),
        warnings=(
            *data.warnings(whole, federated_data, config.data.inputs),
            *_warnings(config, clients, found.algorithm.needs),
            *theory_rates.warnings(config, given),
        ),
        task=task,
        federations=federations,
        constants=known,
        unseen=unseen,
        by_split=by_split,
        server=server,
    )


def method(
    config: Config,
    task: Task,
    clients: int,
    cohort: int,
    known: Smoothness | None,
    found_rates: Sequence[Any] | None = None,
    within: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
    rows: "ProtectRows | None" = None,
    values: Values = NO_VALUES,
) -> Method:
    """The model, its loss, the algorithm with all that is wrapped around it.

    Args:
        config: what to run.
        task: what the rows are like.
        clients: how many there are.
        cohort: how many of them take part in a round.
        known: constants of the clients' losses, if the algorithm asks for them.
        found_rates: what ``rate = "theory"`` stands for; None to find it from the
            constants.
        within: a transform of the algorithm that goes inside of all others.
        rows: how gradients hide single rows; None for ``[protect.rows]``, if any.
        values: in place of those of the configuration, by key, such as
            "algorithm.alpha"; they may be traced.
    """
    model = model_of(config, task)
    config = name_parts(config, model, task)
    plain, loss = losses_of(config, model.apply, task)
    params = jax.eval_shape(model.init, jax.random.key(0))
    check_sizes(config, clients, trees.size(params))
    options = own = config.algorithm
    theory, theory_alone = theory_values(config, known, trees.size(params), found_rates)
    hiding = rows or (config.protect and config.protect.rows)
    # Nodes, which bring rows of their own, have a ledger.
    hidden = None if hiding is None else hiding.hide(loss, counts=rows is not None)
    algorithm = within(
        options.build(
            hidden or loss,
            known,
            clients,
            values={**theory, **values_inside(values, "algorithm")},
        )
    )
    alone = config.measure.local and bool(options.entry.sends)
    rate = config.measure.local_rate
    if isinstance(rate, float):
        sgd = {"rate": rate, "optimizer": None, "schedule": None}
        own, theory_alone = own.model_copy(update=sgd), NO_VALUES
    # A number of rounds is trained as asked, and theory has its own best rate.
    usual = config.measure.local is True and config.algorithm.rate != "theory"
    tuned = rate == "tune" or (rate is None and usual)

    def local_at(factor: Any) -> Algorithm:
        return local_only(loss, own.work(own.scale_rate(factor, theory_alone)))

    return Method(
        model,
        loss,
        apply_tables(config, algorithm, loss, params, clients, cohort, values),
        local_only(loss, own.work(theory_alone)) if alone else None,
        measures_of(config, task, plain, model.apply),
        known,
        local_at if alone and tuned else None,
        hidden,
    )


def vary_by_replica(
    method_with: Callable[..., Method],
    known: Smoothness | None,
    over: Mapping[str, Any],
    local: bool = False,
) -> BySplit:
    """The method as a function of an entry of ``over``.

    Args:
        method_with: ``method`` of constants, rates and values.
        known: the constants of a split, if the algorithm asks for them.
        over: by replica: "smooth" and "convex" of its split, its "rates" of theory, and
            "values" by key, those of these that there are.
        local: whether training alone is such a function, too.
    """

    def build_at(entry: Mapping[str, Any]) -> Method:
        own = known
        if known is not None and "smooth" in entry:
            own = known._replace(smooth=entry["smooth"], convex=entry["convex"])
        return method_with(own, entry.get("rates"), values=entry.get("values", {}))

    def local_at(entry: Mapping[str, Any]) -> Algorithm:
        found = build_at(entry).local
        assert found is not None
        return found

    return BySplit(
        lambda entry: build_at(entry).algorithm,
        local_at if local else None,
        jax.tree.map(lambda of: jnp.asarray(of, float), dict(over)),
    )


def stack_constants(known: Sequence[Smoothness | None]) -> dict[str, np.ndarray]:
    """The constants of each of several splits; nothing of one, or if unknown."""
    each = [one for one in known if one is not None]
    if len(each) < 2:
        return {}
    return {
        "smooth": np.stack([one.smooth for one in each]),
        "convex": np.stack([one.convex for one in each]),
    }


def _key(seed: int | list[int]) -> Key:
    if isinstance(seed, int):
        return jax.random.key(seed)
    return jnp.stack([jax.random.key(one) for one in seed])


def apply_tables(
    config: Config,
    algorithm: Algorithm,
    loss: Loss,
    params: PyTree,
    clients: int,
    cohort: int,
    values: Values,
) -> Algorithm:
    """The algorithm with clipping and noise, the server's loss and compression.

    Args:
        config: with the tables.
        algorithm: that of the configuration.
        loss: of the clients.
        params: shapes of the parameters.
        clients: how many there are.
        cohort: how many of them take part in a round, for ``[privacy]``.
        values: in place of those of the configuration, by key.

    Raises:
        ConfigError: what the tables ask for does not go together.
    """
    options = config.algorithm
    for key in ("privacy", "central", "compress"):
        if getattr(config, key) is not None and not options.entry.sends:
            raise ConfigError(f"{key}: {options.name} sends nothing; leave it out")
        if getattr(config, key) is not None and options.entry.encodes:
            raise ConfigError(
                f"{key}: {options.name} compresses what it sends itself; leave it out"
            )
    if config.privacy is not None:
        algorithm = privacy.add_noise(config, algorithm, cohort)
    if config.central is not None:
        if config.privacy is not None and config.central.upload:
            raise ConfigError("central.upload: would send gradients past [privacy]")
        algorithm = central.mix_losses(
            config.central, algorithm, loss, values_inside(values, "central")
        )
    # Also without compression: it refuses names of parts that the model has not.
    dim = trees.size(_message_shapes(config, params))
    if config.compress is None:
        return algorithm
    answers = config.run.rounds * (config.run.cohort or clients) / clients
    if config.federation is not None and config.federation.secure:
        # Nobody sends a first answer whole: other clients may send theirs later.
        answers = 0.0
    return compress.compress_updates(config.compress, algorithm, dim, clients, answers)


def _message_shapes(config: Config, params: PyTree) -> PyTree:
    """The parameters that clients send, by shape."""
    keeps, leaves = config.algorithm.entry.keeps, leaves_by_path(params)
    mixed = getattr(config.algorithm, "mix", None)
    if isinstance(mixed, list):
        _require_parts("mix", mixed, leaves)
    if keeps is None:
        return params
    names = getattr(config.algorithm, keeps)
    _require_parts(keeps, names, leaves)
    return [
        leaf
        for path, leaf in leaves.items()
        if not any(matches(name, path) for name in names)
    ]


def _require_parts(key: str, names: Sequence[str], leaves: Mapping[str, Any]) -> None:
    """Refuse a name that is no part of the model."""
    for name in names:
        if not any(matches(name, path) for path in leaves):
            raise ConfigError(
                f'algorithm.{key}: "{name}" is no part of the model, whose '
                f"parameters are {', '.join(leaves)}"
            )


def check_sizes(config: Config, clients: int, dim: int) -> None:
    """Refuse lists of ``[algorithm]`` that do not fit the clients, and its compressor.

    Args:
        config: what to run.
        clients: how many there are.
        dim: parameters of the model.
    """
    check_lists("algorithm", config.algorithm, clients)
    compressor = getattr(config.algorithm, "compressor", None)
    if compressor is not None:
        compress.fit_compressor("algorithm.compressor", compressor, dim)


def _warnings(config: Config, clients: int, needs: Needs) -> list[str]:
    """What is odd about the tables, but no error; ``needs`` are the algorithm's."""
    hidden, table, packed = config.privacy, config.central, config.compress
    found = [] if packed is None else compress.feedback_warnings(packed, needs)
    if hidden is not None and hidden.delta >= 1 / clients:
        found.append(
            f"privacy.delta: {hidden.delta:g} is not below 1/{clients}; it would allow "
            "to publish a whole client, and is to be much smaller"
        )
    if table is None or table.how != "parallel" or table.rate is None:
        return found
    found.append(
        f"central.rate: parallel training minimizes a mixture with weight "
        f"{table.weight:g} only if {table.rate:g} times {table.steps} steps is the "
        "clients' rate times their steps times the server's rate, all of them plain; "
        "without central.rate it follows them"
    )
    if hidden is not None:
        found.append(
            "central.how: [privacy] clips the clients' side alone, so that parallel "
            f"training minimizes another mixture than one with weight {table.weight:g};"
            ' "one_way" does not'
        )
    return found
