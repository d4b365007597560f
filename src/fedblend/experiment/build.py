# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a configuration to what ``simulate`` takes: data, model, loss, algorithm."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import metrics, models, objectives
from fedblend.core import Algorithm, Key, Loss
from fedblend.data import own, partition, sources
from fedblend.data.allotment import Partition
from fedblend.data.dataset import (
    DataError,
    Dataset,
    federation_of,
    one_class_clients,
)
from fedblend.data.federation import Federation
from fedblend.experiment import sections
from fedblend.experiment.config import Config
from fedblend.experiment.registry import ALGORITHMS, local_only
from fedblend.experiment.section import ConfigError
from fedblend.mixing import Apply

_LOSSES = {
    "classes": "cross_entropy",
    "binary": "logistic",
    "regression": "squared_error",
}
_KINDS = {
    "cross_entropy": ("classes", "binary"),
    "logistic": ("binary",),
    "squared_error": ("regression",),
}
_METRICS = {
    "accuracy": ("classes", "binary"),
    "auc": ("binary",),
    "mse": ("regression",),
    "recall": ("classes",),
}


class Built(NamedTuple):
    """A configuration, ready to be simulated."""

    federation: Federation
    model: models.Model
    loss: Loss
    algorithm: Algorithm
    local: Algorithm | None
    """Training alone with the same local work, if it is to be compared with."""
    key: Key
    settings: dict[str, Any]
    """What else ``simulate`` takes."""
    facts: dict[str, Any]
    """What identifies the data: name, rows, sha256 of rows and of the partition."""
    warnings: tuple[str, ...]


def build(config: Config) -> Built:
    """Load and share out the data, and build all that is computed with.

    Raises:
        ConfigError: what the configuration asks for does not go together.
        DataError: the data cannot be had, or cannot be used.
    """
    dataset = load_dataset(config.data)
    parts = share_out(config.data, dataset)
    federation = _federation(config.data, dataset, parts)
    name = config.model.loss or _LOSSES[dataset.kind]
    model = _model(config, dataset, name)
    plain = getattr(objectives, name)(model.apply)
    loss = objectives.l2(plain, config.model.l2) if config.model.l2 else plain
    options = config.algorithm
    _check_steps(options, federation.clients)
    chosen = getattr(options, "name")  # noqa: B009
    alone = config.measure.local and chosen != "local_only"
    return Built(
        federation=federation,
        model=model,
        loss=loss,
        algorithm=ALGORITHMS[chosen].build(loss, options),
        local=local_only(loss, options) if alone else None,
        key=_key(config.run.seed),
        settings=_settings(config, _measures(config, dataset, plain, model.apply)),
        facts=_facts(dataset, parts),
        warnings=tuple(_warnings(federation)),
    )


def load_dataset(data: sections.Data) -> Dataset:
    """The rows that ``[data]`` names."""
    if data.source is not None:
        return sources.load(data.source, **data.options)
    assert data.file is not None
    return own.read(
        Path(data.file),
        target=data.target,
        client=data.client,
        inputs=data.inputs,
        kind=data.kind,
    )


def share_out(data: sections.Data, dataset: Dataset) -> Partition:
    """The rows of every client, as ``[data]`` asks for them."""
    labels, seed = dataset.rows[1], data.seed
    if isinstance(data, sections.Iid):
        return partition.iid(len(labels), data.clients, seed)
    if isinstance(data, sections.Contiguous):
        return partition.contiguous(len(labels), data.clients)
    if isinstance(data, sections.ClassesPerClient):
        return partition.classes_per_client(labels, data.clients, data.classes, seed)
    if isinstance(data, sections.ClassPairs):
        pairs: Any = data.pairs
        return partition.class_pairs(labels, data.clients, seed, pairs)
    if isinstance(data, sections.Dirichlet):
        return partition.dirichlet(
            labels, data.clients, data.concentration, seed, data.minimum
        )
    if isinstance(data, sections.Shards):
        return partition.shards(labels, data.clients, data.per_client, seed)
    if isinstance(data, sections.ByKey):
        return partition.by_key(dataset.keys, data.minimum)
    assert isinstance(data, sections.Stored)
    return Partition.load(data.path)


def _federation(data: sections.Data, dataset: Dataset, parts: Partition) -> Federation:
    try:
        return federation_of(
            dataset,
            parts,
            validation=data.validation,
            test=data.test,
            seed=data.seed,
        )
    except DataError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from None


def _model(config: Config, dataset: Dataset, loss: str) -> models.Model:
    choice = config.model
    if dataset.kind not in _KINDS[loss]:
        raise ConfigError(
            f'model.loss: "{loss}" is not for {dataset.kind} targets; it needs '
            f"{' or '.join(_KINDS[loss])}"
        )
    options = choice.model_dump(exclude={"name", "l2", "loss"})
    name = getattr(choice, "name")  # noqa: B009
    binary = dataset.kind == "binary"
    if binary and name == "logistic" and loss == "cross_entropy":
        raise ConfigError(
            'model.loss: "cross_entropy" needs a score for each class, and logistic '
            "has a single one"
        )
    outputs = 2 if binary and loss == "cross_entropy" else dataset.outputs
    try:
        return models.build(
            name,
            dataset.rows[0].shape[1:],
            outputs,
            **options,
            dtype=jnp.dtype(config.run.precision),
        )
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None


def _check_steps(options: Any, clients: int) -> None:
    for where, work in (
        ("algorithm", options),
        ("algorithm.tune", getattr(options, "tune", None)),
    ):
        steps = getattr(work, "steps", None)
        if isinstance(steps, list) and len(steps) != clients:
            raise ConfigError(
                f"{where}.steps: {len(steps)} numbers for {clients} clients; give one "
                "for each, or a single one"
            )


def _measures(
    config: Config, dataset: Dataset, loss: Loss, apply: Apply
) -> Mapping[str, Callable]:
    """The measures asked for, or the usual ones; loss is without the l2 term."""
    asked = config.measure.metrics
    if asked is None:
        return metrics.standard(dataset.kind, loss, apply)
    builders: dict[str, Callable] = {
        "accuracy": metrics.accuracy,
        "auc": metrics.auc,
        "mse": metrics.mean_squared_error,
    }
    chosen = {}
    for place, name in enumerate(asked):
        word, _, number = name.partition("@")
        key = f'measure.metrics.{place}: "{name}"'
        if dataset.kind not in _METRICS.get(word, (dataset.kind,)):
            raise ConfigError(
                f"{key} is not for {dataset.kind} targets; it needs "
                f"{' or '.join(_METRICS[word])}"
            )
        if number and int(number) > dataset.outputs:
            raise ConfigError(f"{key}: there are only {dataset.outputs} classes")
        if word == "loss":
            chosen[name] = metrics.mean_loss(loss)
        elif number:
            chosen[name] = metrics.recall_at(apply, int(number))
        else:
            chosen[name] = builders[word](apply)
    return chosen


def _settings(config: Config, measures: Mapping[str, Callable]) -> dict[str, Any]:
    run, measure = config.run, config.measure
    return {
        "rounds": run.rounds,
        "cohort": run.cohort,
        "every": run.every,
        "weights": run.weights,
        "chunk": run.chunk,
        "store": run.store,
        "dropout": run.dropout,
        "reduction": run.reduction,
        "trim": run.trim,
        "measure": measures,
        "measure_on": measure.on,
        "splits": measure.splits,
    }


def _key(seed: int | list[int]) -> Key:
    if isinstance(seed, int):
        return jax.random.key(seed)
    return jnp.stack([jax.random.key(one) for one in seed])


def _facts(dataset: Dataset, parts: Partition) -> dict[str, Any]:
    digest = hashlib.sha256()
    for rows in (dataset.rows, dataset.test_rows or ()):
        for array in rows:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return {
        "name": dataset.name,
        "rows": len(dataset.rows[0]),
        "sha256": digest.hexdigest(),
        "partition_sha256": parts.hash,
    }


def _warnings(federation: Federation):
    lonely = one_class_clients(federation)
    if lonely:
        name = federation.name(lonely[0])
        yield (
            f"{len(lonely)} of {federation.clients} clients have training rows of one "
            f"class only (the first is {name!r}); alone they cannot learn another"
        )
