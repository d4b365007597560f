# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What server and nodes agree on: the task, the method, and what an experiment is.

Both sides build the method from the same text. A node is told the configuration, how
many clients there are and how many rows the largest has, and nothing of other nodes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedblend.core import Key, PyTree
from fedblend.data.further import Task
from fedblend.experiment import toml
from fedblend.experiment.build import Method, method
from fedblend.experiment.config import Config, check, dump
from fedblend.experiment.section import ConfigError
from fedblend.experiment.sections import Nodes

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


def task_of(data: Nodes) -> Task:
    """The task that the nodes' rows must be of."""
    labels = tuple(data.labels or ())
    assert data.kind is not None
    outputs = (data.classes or len(labels)) if data.kind == "classes" else 1
    columns = tuple(data.columns or ())
    shape = tuple(data.shape) if data.shape is not None else (len(columns),)
    return Task(data.kind, outputs, shape, labels, columns)


def row_of(task: Task) -> PyTree:
    """Shapes and dtypes of one row of it."""
    target = jnp.float32 if task.kind == "regression" else jnp.int32
    return (
        jax.ShapeDtypeStruct(task.shape, jnp.float32),
        jax.ShapeDtypeStruct((), target),
    )


def method_of(config: Config, clients: int) -> Method:
    """The method, as server and nodes build it alike."""
    task = task_of(nodes_of(config))
    return method(config, task, clients, config.run.cohort or clients, _unknown)


def _unknown(loss: str) -> None:
    """Constants of losses are computed from rows, which nobody here has."""
    del loss


def root_of(config: Config) -> Key:
    """The key that server and nodes share."""
    assert isinstance(config.run.seed, int)
    return jax.random.key(config.run.seed)


def rounds_alone(config: Config, clients: int) -> int:
    """How long a client trains alone for comparison: as in a simulation."""
    local = config.measure.local
    if not isinstance(local, bool):
        return local
    return -(-config.run.rounds * (config.run.cohort or clients) // clients)


def text_of(config: Config) -> str:
    """The configuration as nodes are told it: no path of the server's."""
    if config.central is not None and config.central.file is not None:
        name = Path(config.central.file).name
        central = config.central.model_copy(update={"file": name})
        config = config.model_copy(update={"central": central})
    return dump(config)


def config_in(words: Mapping[str, Any]) -> Config:
    """The configuration in a letter.

    Raises:
        ConfigError: there is none, or it is wrong.
    """
    text = words.get("config")
    if not isinstance(text, str):
        raise ConfigError("letter: has no configuration")
    config = check(toml.parse(text, "letter"), "letter")
    nodes_of(config)
    return config
