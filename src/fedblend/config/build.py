# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a configuration to what ``simulate`` takes: data, model, loss, algorithm."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import models
from fedblend.config import transforms
from fedblend.config.config import Config
from fedblend.config.constants import smoothness
from fedblend.config.data import (
    facts,
    hold_out,
    load_dataset,
    set_aside,
    share_out,
    splits_of,
    strata,
    warnings,
)
from fedblend.config.method import BySplit, by_constants, method
from fedblend.core import Algorithm, Key, Loss
from fedblend.data.dataset import Task, task_of
from fedblend.data.federated import FederatedData, split_clients
from fedblend.errors import ConfigError
from fedblend.metrics import Metric
from fedblend.simulation.sampling import settled
from fedblend.simulation.spec import RunSpec
from fedblend.theory.constants import Smoothness


class Built(NamedTuple):
    """A configuration, ready to be simulated."""

    federated_data: FederatedData
    """The clients, their rows as the first of the seeds splits them."""
    model: models.Model
    loss: Loss
    algorithm: Algorithm
    local: Algorithm | None
    measures: Mapping[str, Metric]
    key: Key
    spec: RunSpec
    """What is simulated, and how."""
    facts: dict[str, Any]
    """What identifies the data: name, rows, sha256 of rows and of the partition."""
    warnings: tuple[str, ...]
    task: Task
    federations: Sequence[FederatedData]
    """The same clients with the split of each seed, or of all of them."""
    unseen: Sequence[FederatedData] = ()
    """Clients that take no part in the training, in the same splits."""
    by_split: BySplit | None = None
    """Instead of ``algorithm`` and ``local``, where splits differ in constants."""
    server: FederatedData | None = None
    """The server's own rows, where it has some."""
    smoothness: Smoothness | None = None
    """The constants of f_i, where the algorithm asks for them and they are known."""


def build(config: Config) -> Built:
    """Load and share out the data, and build all that is computed with.

    Raises:
        ConfigError: what the configuration asks for does not go together.
        DataError: the data cannot be had, or cannot be used.
    """
    whole = load_dataset(config.data)
    task = task_of(whole)
    dataset, server = set_aside(
        config.central, whole, config.data.target, config.data.seed
    )
    parts = share_out(config.data, dataset)
    splits = splits_of(config.data, config.run.seed)
    federations = [hold_out(config.data, dataset, parts, split) for split in splits]
    unseen: tuple[FederatedData, ...] = ()
    if config.data.unseen:
        fraction, seed = config.data.unseen, config.data.seed
        pairs = [split_clients(one, fraction, seed) for one in federations]
        federations, unseen = zip(*pairs, strict=True)
    federated_data = federations[0]
    if config.select is not None and len(federations) > 1:
        raise ConfigError(
            "data.split_seed: is missing; [select] knows which rows are used in one "
            "split, so that several run.seed need the same: data.split_seed=0"
        )
    drawn = strata(config.populations, federated_data) or config.run.cohort
    clients = federated_data.clients
    method_with = partial(
        method,
        task=task,
        clients=clients,
        cohort=settled(drawn, clients)[1],
    )
    found = method_with(
        config, constants=lambda loss: smoothness(config.model, loss, federated_data)
    )
    by_split = None
    if len(federations) > 1 and found.smoothness is not None:
        by_split = by_constants(config, task, found, federations, method_with)
    key = _key(config.run.seed)
    selected = transforms.selected(config, found.algorithm, federated_data)
    found = found._replace(algorithm=selected)
    return Built(
        federated_data=federated_data,
        **found._asdict(),
        key=key,
        spec=RunSpec(  # the other keys of [run] are its fields
            algorithm=found.algorithm if by_split is None else by_split.algorithm,
            params=found.model.init,
            federated_data=federations,
            key=key,
            **config.run.model_dump(exclude={"seed", "precision", "cohort"}),
            cohort=drawn,
            central=None if server is None else server.train.shard(0),
            measure=found.measures,
            measure_on=config.measure.on,
            splits=config.measure.splits,
            over=None if by_split is None else by_split.over,
        ),
        facts=facts(whole, parts, splits),
        warnings=(
            *warnings(whole, federated_data, config.data.inputs),
            *transforms.warnings(config, federated_data.clients),
        ),
        task=task,
        federations=federations,
        unseen=unseen,
        by_split=by_split,
        server=server,
    )


def _key(seed: int | list[int]) -> Key:
    if isinstance(seed, int):
        return jax.random.key(seed)
    return jnp.stack([jax.random.key(one) for one in seed])
