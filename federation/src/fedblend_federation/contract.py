# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What server and nodes agree on: the configuration, the method, the terms.

Both sides build the method from the same text, which has no paths of the server. At
enrollment the server sends each node the terms: the configuration, the capacities (the
largest number of rows of any client, by split), whether constants of the losses are
used, the rates that theory allows, and the preprocessing of raw tables. Nothing else of
other clients.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.config.build import Method, method
from fedblend.config.config import Config, dump, loads
from fedblend.config.imports import TABLES, is_import_path
from fedblend.config.tables.data import NodeRows
from fedblend.config.tables.model import (
    has_constants,
    loss_name,
    model_of,
    reads_ranks,
    smoothness,
)
from fedblend.config.theory_rates import Rates, asks_for_constants, rates
from fedblend.core import Algorithm, Down, Key, PyTree, Shard
from fedblend.data.dataset import NUMBERS, Task
from fedblend.data.federated import FederatedData, Shards
from fedblend.errors import ConfigError
from fedblend.metrics import main_first
from fedblend.simulation.result import LocalBudget
from fedblend.theory.constants import Smoothness
from fedblend_federation import raw_tables

if TYPE_CHECKING:
    from fedblend.config.tables.privacy import ProtectRows
    from fedblend.models import Model

SPLITS = ("train", "validation", "test")


class Facts(NamedTuple):
    """What the method depends on that only the nodes' rows determine."""

    constants: Smoothness | None = None
    """Constants of the clients' losses; a node has its own in the place of all."""
    rates: Rates | None = None
    """What ``rate = "theory"`` stands for."""
    preprocessing: "raw_tables.Preprocessing | None" = None
    """What the statistics of all nodes make of raw tables."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """An experiment whose rows lie on nodes, checked once, and what follows from it.

    Models have the precision of the configuration: use the properties inside of
    ``precision(config.run.precision)``.
    """

    config: Config
    nodes: NodeRows

    @property
    def clients(self) -> int:
        """The number of clients."""
        return self.nodes.clients

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The splits that every node makes of its rows."""
        wanted = (True, self.nodes.validation, self.nodes.test)
        return tuple(name for name, part in zip(SPLITS, wanted, strict=True) if part)

    @cached_property
    def schema(self) -> "raw_tables.Schema | None":
        """The columns of raw tables; None where nodes have numbers."""
        found = raw_tables.schema_of(self.nodes)
        return found and found._replace(ranks=reads_ranks(self.config))

    def statistics(self, splits: Mapping[str, Shards]) -> dict[str, list[float]]:
        """Those of a client's training rows, of the columns of a raw table."""
        assert self.schema is not None
        return raw_tables.describe(self.schema, splits["train"])

    @cached_property
    def task(self) -> Task:
        """The task that the nodes' rows must be of."""
        data = self.nodes
        labels, columns = tuple(data.labels or ()), tuple(data.columns or ())
        assert data.kind is not None
        outputs = (data.classes or len(labels)) if data.kind == "classes" else 1
        shape = (len(columns),) if data.shape is None else tuple(data.shape)
        if self.schema is not None:
            columns, shape = self.schema.names, (self.schema.width,)
        unit = data.center, data.scale, data.log_shift
        ranks = 0 if self.schema is None else len(self.schema.ranked)
        return Task(data.kind, outputs, shape, labels, columns, *unit, ranks)

    @cached_property
    def row(self) -> PyTree:
        """Shapes and dtypes of one row."""
        target = jnp.float32 if self.task.kind in NUMBERS else jnp.int32
        return (
            jax.ShapeDtypeStruct(self.task.shape, jnp.float32),
            jax.ShapeDtypeStruct((), target),
        )

    @cached_property
    def loss(self) -> str:
        """The name of the loss."""
        return loss_name(self.config, self.task)

    @cached_property
    def model(self) -> "Model":
        """The model."""
        return model_of(self.config, self.task)

    @cached_property
    def params(self) -> PyTree:
        """Shapes and dtypes of its parameters."""
        return jax.eval_shape(self.model.init, jax.random.key(0))

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of a row that a gradient of the model keeps between its layers."""
        apply, (inputs, _) = self.model.apply, self.row

        def backward(params, batch):
            return jax.vjp(lambda own: apply(own, batch), params)[1]

        def count_bytes(rows: int) -> int:
            batch = jax.ShapeDtypeStruct((rows, *inputs.shape), inputs.dtype)
            found = jax.tree.leaves(jax.eval_shape(backward, self.params, batch))
            return sum(leaf.size * leaf.dtype.itemsize for leaf in found)

        return count_bytes(3) - count_bytes(2)

    @cached_property
    def base(self) -> PyTree:
        """Shapes and dtypes of the frozen base that the parameters change, if any."""
        if self.config.adapt is None:
            return ()
        whole = self.config.model_copy(update={"adapt": None})
        model = model_of(whole, self.task)
        return jax.eval_shape(model.init, jax.random.key(0))

    @cached_property
    def root(self) -> Key:
        """The key that server and nodes share."""
        return jax.random.key(self.seed)

    @property
    def seed(self) -> int:
        """The seed of that key."""
        assert isinstance(self.config.run.seed, int)
        return self.config.run.seed

    @cached_property
    def text(self) -> str:
        """The configuration as nodes get it: without paths of the server."""
        return dump(remove_paths(self.config))

    @cached_property
    def uses_theory(self) -> bool:
        """Whether the rate is the one that theory allows."""
        return getattr(self.config.algorithm, "rate", None) == "theory"

    @cached_property
    def uses_constants(self) -> bool:
        """Whether the method weighs or steps by constants of the clients' losses.

        With ``[privacy]`` no client is weighed by its constants.
        """
        needed = self.config.privacy is None or self.uses_theory
        asks = asks_for_constants(self.config)
        known = has_constants(self.config.model, self.loss)
        # Nodes describe themselves before the inputs of raw tables are known.
        return asks and known and needed and self.schema is None

    def constants(self, splits: Mapping[str, Shards]) -> Smoothness | None:
        """The constants of a client with these rows, if the method uses them."""
        if not self.uses_constants:
            return None
        rows = FederatedData(splits["train"])
        return smoothness(self.config.model, self.loss, rows)

    def rates(self, constants: Smoothness | None) -> Rates | None:
        """The rates of ``Facts``, from the constants of all clients.

        Raises:
            ConfigError: theory has none for this configuration.
        """
        if not self.uses_theory:
            return None
        asked = self.config.federation
        if asked is not None and asked.quorum < 1:
            raise ConfigError(
                f"federation.quorum: is {asked.quorum:g}; theory needs 1.0 there"
            )
        return rates(self.config, constants, trees.size(self.params))

    def method(self, facts: Facts, rows: "ProtectRows | None" = None) -> Method:
        """The method, as server and nodes build it alike.

        ``rows`` is how the node that asks hides its rows.
        """
        return method(
            self.config,
            self.task,
            self.clients,
            self.config.run.cohort or self.clients,
            facts.constants,
            facts.rates,
            rows=rows,
        )

    def budget_alone(self, built: Method) -> LocalBudget | None:
        """How many rounds a client trains alone for comparison; None if it does not."""
        local = self.config.measure.local
        if built.local is None:
            return None
        if not isinstance(local, bool):
            return LocalBudget(local)
        return LocalBudget(None, "its own rows", main_first(built.measures)[0])

    def central_shapes(self) -> Shard | None:
        """Shapes and dtypes of the server's rows, as nodes assume them."""
        central = self.config.central
        if central is None or central.file is None:
            return None
        # The server knows how many it has; on a node they need only fill a batch.
        count = central.batch_size or 1
        number: Any = jax.ShapeDtypeStruct((), np.dtype(np.int32))
        return Shard(trees.shapes(self.row, count), number, number, number, count)

    def terms(self, facts: Facts, capacities: Mapping[str, int]) -> dict[str, Any]:
        """The terms that the server sends at enrollment."""
        return {
            "config": self.text,
            "capacities": dict(capacities),
            "constants": facts.constants is not None,
            "rates": facts.rates,
            "preprocessing": facts.preprocessing and facts.preprocessing.dump(),
        }

    def capacities(
        self, terms: Mapping[str, Any], splits: Mapping[str, Shards]
    ) -> dict[str, int]:
        """The capacities in the terms, for a client with these rows."""
        found = terms.get("capacities")
        if not isinstance(found, dict) or set(found) != set(splits):
            raise ConfigError("message: has no capacities")
        for name, split in splits.items():
            room = found[name]
            if not isinstance(room, int) or not split.total <= room <= 2**31 - 1:
                raise ConfigError(f"message: capacities.{name}: {room!r} is too small")
        return found

    def facts(self, terms: Mapping[str, Any], splits: Mapping[str, Shards]) -> Facts:
        """The facts in the terms, with what a client knows of its own rows."""
        rates = _rates(terms.get("rates")) if self.uses_theory else None
        constants = self.constants(splits) if terms.get("constants") else None
        if constants is not None:
            everywhere = np.ones(self.clients)
            constants = constants._replace(
                smooth=constants.smooth * everywhere,
                convex=constants.convex * everywhere,
            )
        return Facts(constants, rates)


def contract_of(config: Config) -> Contract:
    """The contract of a configuration.

    Raises:
        ConfigError: it is for one machine, or has keys that are not for a federation.
    """
    data = config.data
    if not isinstance(data, NodeRows):
        raise ConfigError(
            f'data.partition: is "{data.partition}"; a federation needs "nodes"'
        )
    for key, given in (
        ("populations", config.populations is not None),
        ("run.seed", not isinstance(config.run.seed, int)),
        ("run.dropout", config.run.dropout > 0),
        ("measure.on", config.measure.on is not None),
        ("measure.splits", config.measure.splits is not None),
        ('measure.local_rate = "tune"', config.measure.local_rate == "tune"),
        ("central.classes", getattr(config.central, "classes", None) is not None),
        ("central.share", getattr(config.central, "share", None) is not None),
    ):
        if given:
            raise ConfigError(f"{key}: is not for a federation")
    return Contract(config, data)


def parse_contract(text: str) -> Contract:
    """The contract of a configuration that arrived in a message.

    Raises:
        ConfigError: one line that says what is wrong with it.
    """
    return contract_of(loads(text, "message"))


def _rates(sent: Any) -> Rates:
    match sent:
        case [float(together), float(alone), float(momentum)] if (
            0 < together < inf and 0 < alone < inf and 0 <= momentum < 1
        ):
            return Rates(together, alone, momentum)
    raise ConfigError("message: has no rates")


class Deployment(NamedTuple):
    """What a client gets to make the model that it deploys."""

    message: Down
    shared: PyTree = ()
    """The shared model, where the message holds it in another form."""


def deployment(algorithm: Algorithm, down: Down, request, params) -> Deployment:
    """The deployment of a client with this request."""
    message = down if algorithm.needs.whole else algorithm.wire.tell(down, request)
    forms = (jax.tree.structure(params), jax.tree.structure(None))
    plain = jax.tree.structure(message.shared) in forms
    return Deployment(message, () if plain else down.shared)


_FILES = (("central", "file"), ("adapt", "base"))
"""Keys that are paths, of which nodes get the names alone."""


def remove_paths(config: Config) -> Config:
    """The configuration with names of files, and without folders of code.

    A node finds its base by ``adapt.sha256``, and has its own code.
    """
    for name, key in _FILES:
        path = getattr(getattr(config, name), key, None)
        if path is not None:
            config = _replace_key(config, name, key, Path(path).name)
    for name in TABLES:
        if is_import_path(getattr(config, name).name):
            config = _replace_key(config, name, "import_from", None)
    return config


def _replace_key(config: Config, name: str, key: str, value: str | None) -> Config:
    table = getattr(config, name).model_copy(update={key: value})
    return config.model_copy(update={name: table})
