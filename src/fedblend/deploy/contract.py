# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What server and nodes agree on: the task, the method, and what an experiment is.

Both sides build the method from the same text. A node is told the configuration, how
many clients there are, how many rows the largest has, of which tables any of them uses
how many rows at most, and which rate theory allows all of them; nothing else of others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.config import toml, transforms
from fedblend.config.build import Method, method
from fedblend.config.config import LOOKED_UP, Config, check, dump
from fedblend.config.constants import has_constants, smoothness, with_rates
from fedblend.config.schema.tables import Nodes
from fedblend.config.tasks import loss_name, model_of
from fedblend.core import Key, PyTree
from fedblend.data.federated import FederatedData, Shards
from fedblend.data.readers.read import Task
from fedblend.errors import ConfigError
from fedblend.models import Model
from fedblend.report.curves import in_order
from fedblend.simulation.early_stopping import Budget
from fedblend.theory.constants import Smoothness

SPLITS = ("train", "validation", "test")


def nodes_of(config: Config) -> Nodes:
    """The table of a configuration whose rows lie on nodes.

    Raises:
        ConfigError: it is for one machine, or asks for what a federation has not.
    """
    data = config.data
    if not isinstance(data, Nodes):
        raise ConfigError(
            f'data.partition: is "{data.partition}"; a federation needs "nodes"'
        )
    for key, odd in (
        ("populations", config.populations is not None),
        ("run.seed", not isinstance(config.run.seed, int)),
        ("run.dropout", config.run.dropout > 0),
        ("measure.on", config.measure.on is not None),
        ("measure.splits", config.measure.splits is not None),
        ("central.classes", getattr(config.central, "classes", None) is not None),
        ("central.share", getattr(config.central, "share", None) is not None),
    ):
        if odd:
            raise ConfigError(f"{key}: is not for a federation")
    return data


class Facts(NamedTuple):
    """What a method is made of that only the nodes' rows tell."""

    rooms: Mapping[str, int] = {}
    """A bound on the rows that a client uses, of each table of ``[select]``."""
    known: Smoothness | None = None
    """Constants of the clients' losses; a node has its own in the place of all."""
    rates: tuple[float, float] | None = None
    """In place of ``rate = "theory"``: together, and of a client alone."""


def task_of(config: Config) -> Task:
    """The task that the nodes' rows must be of."""
    data = nodes_of(config)
    labels = tuple(data.labels or ())
    assert data.kind is not None
    outputs = (data.classes or len(labels)) if data.kind == "classes" else 1
    columns = tuple(data.columns or ())
    shape = tuple(data.shape) if data.shape is not None else (len(columns),)
    numbers = config.model.name in LOOKED_UP
    return Task(data.kind, outputs, shape, labels, columns, numbers)


def row_of(task: Task) -> PyTree:
    """Shapes and dtypes of one row of it."""
    inputs = jnp.int32 if task.numbers else jnp.float32
    target = jnp.float32 if task.kind == "regression" else jnp.int32
    return (
        jax.ShapeDtypeStruct(task.shape, inputs),
        jax.ShapeDtypeStruct((), target),
    )


def model_for(config: Config) -> Model:
    """The model."""
    task = task_of(config)
    return model_of(config, task, loss_name(config, task))


def params_of(config: Config) -> PyTree:
    """Shapes and dtypes of its parameters."""
    return jax.eval_shape(model_for(config).init, jax.random.key(0))


def method_of(config: Config, clients: int, facts: Facts) -> Method:
    """The method, as server and nodes build it alike."""
    if facts.rates is None:
        return _method(config, clients, facts)
    together, alone = (
        _method(_at_rate(config, rate), clients, facts) for rate in facts.rates
    )
    return together._replace(local=alone.local)


def _method(config: Config, clients: int, facts: Facts) -> Method:
    cohort = config.run.cohort or clients
    built = method(config, task_of(config), clients, cohort, lambda loss: facts.known)
    algorithm = transforms.selected_within(
        config, built.algorithm, params_of(config), facts.rooms
    )
    return built._replace(algorithm=algorithm)


def _at_rate(config: Config, rate: float) -> Config:
    options = config.algorithm.model_copy(update={"rate": rate})
    return config.model_copy(update={"algorithm": options})


def asks_constants(config: Config) -> bool:
    """Whether the method weighs or steps by constants of the clients' losses.

    With ``[privacy]`` nothing is weighed by what clients say first.
    """
    loss = loss_name(config, task_of(config))
    needed = config.privacy is None or in_theory(config)
    asks = "smooth" in config.algorithm.entry.parameters
    return asks and has_constants(config.model, loss) and needed


def in_theory(config: Config) -> bool:
    """Whether the rate is the one that theory allows."""
    return getattr(config.algorithm, "rate", None) == "theory"


def rates_of(config: Config, known: Smoothness | None) -> tuple[float, float] | None:
    """The rates of ``Facts``, from the constants of all clients.

    Raises:
        ConfigError: theory has none for this.
    """
    if not in_theory(config):
        return None
    asked = config.federation
    if asked is not None and asked.quorum < 1:
        raise ConfigError(
            f"federation.quorum: is {asked.quorum:g}; theory needs 1.0 there"
        )
    options, own = with_rates(config, known, trees.size(params_of(config)))
    return options.rate, own.rate


def own_rooms(config: Config, splits: Mapping[str, Shards]) -> dict[str, int]:
    """The bounds of ``Facts``, of a client with these rows."""
    return transforms.rooms(config, _alone(splits), params_of(config))


def own_constants(config: Config, splits: Mapping[str, Shards]) -> Smoothness | None:
    """The constants of a client with these rows."""
    loss = loss_name(config, task_of(config))
    return smoothness(config.model, loss, _alone(splits))


def _alone(splits: Mapping[str, Shards]) -> FederatedData:
    return FederatedData(splits["train"])


def root_of(config: Config) -> Key:
    """The key that server and nodes share."""
    assert isinstance(config.run.seed, int)
    return jax.random.key(config.run.seed)


def budget_alone(config: Config, built: Method) -> Budget | None:
    """How long a client trains alone for comparison, if it does.

    As many rounds as were asked for, or its own best number.
    """
    local = config.measure.local
    if built.local is None:
        return None
    if not isinstance(local, bool):
        return Budget(local)
    return Budget(None, "its own rows", in_order(built.measures)[0])


def text_of(config: Config) -> str:
    """The configuration as nodes are told it: no path of the server's."""
    if config.central is not None and config.central.file is not None:
        name = Path(config.central.file).name
        central = config.central.model_copy(update={"file": name})
        config = config.model_copy(update={"central": central})
    return dump(config)


def config_in(words: Mapping[str, Any]) -> Config:
    """The configuration in a message.

    Raises:
        ConfigError: there is none, or it is wrong.
    """
    text = words.get("config")
    if not isinstance(text, str):
        raise ConfigError("message: has no configuration")
    config = check(toml.parse(text, "message"), "message")
    nodes_of(config)
    return config
