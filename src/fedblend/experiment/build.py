# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a configuration to what ``simulate`` takes: data, model, loss, algorithm."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import metrics, models, objectives, trees
from fedblend.core import Algorithm, Key, Loss
from fedblend.data.dataset import Dataset
from fedblend.data.federation import Federation
from fedblend.experiment.compression import compressed
from fedblend.experiment.config import Config
from fedblend.experiment.constants import smoothness, with_rates
from fedblend.experiment.holding import (
    facts,
    hold_out,
    load_dataset,
    share_out,
    warnings,
)
from fedblend.experiment.registry import ALGORITHMS, local_only
from fedblend.experiment.section import ConfigError
from fedblend.mixing import Apply
from fedblend.theory.constants import Smoothness

_LOSSES = {
    "classes": "cross_entropy",
    "binary": "logistic",
    "regression": "squared_error",
    "sequence": "sequence_cross_entropy",
    "tags": "multilabel",
}
_KINDS = {
    "cross_entropy": ("classes", "binary"),
    "logistic": ("binary",),
    "squared_error": ("regression",),
    "sequence_cross_entropy": ("sequence",),
    "multilabel": ("tags",),
}
_METRICS = {
    "accuracy": ("classes", "binary", "sequence"),
    "auc": ("binary",),
    "mse": ("regression",),
    "recall": ("classes", "tags"),
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
    smoothness: Smoothness | None = None
    """The constants of f_i, where the algorithm asks for them and they are known."""


def build(config: Config) -> Built:
    """Load and share out the data, and build all that is computed with.

    Raises:
        ConfigError: what the configuration asks for does not go together.
        DataError: the data cannot be had, or cannot be used.
    """
    dataset = load_dataset(config.data)
    parts = share_out(config.data, dataset)
    federation = hold_out(config.data, dataset, parts)
    name = config.model.loss or _LOSSES[dataset.kind]
    model = _model(config, dataset, name)
    plain = getattr(objectives, name)(model.apply)
    loss = objectives.l2(plain, config.model.l2) if config.model.l2 else plain
    options = config.algorithm
    _check_lists(options, federation.clients)
    chosen = getattr(options, "name")  # noqa: B009
    alone = config.measure.local and chosen != "local_only"
    params = jax.eval_shape(model.init, jax.random.key(0))
    dim = trees.size(params)
    entry = ALGORITHMS[chosen]
    known = smoothness(config.model, name, federation) if entry.constants else None
    options, own = with_rates(config, known, dim)
    facts_it_takes = (
        *([known] if entry.constants else []),
        *([federation.clients] if entry.clients else []),
    )
    algorithm = entry.build(loss, options, *facts_it_takes)
    said = trees.size(config.algorithm.said(params))
    algorithm = compressed(config.compress, algorithm, chosen, said, federation.clients)
    return Built(
        federation=federation,
        model=model,
        loss=loss,
        algorithm=algorithm,
        local=local_only(loss, own) if alone else None,
        key=_key(config.run.seed),
        settings=_settings(config, _measures(config, dataset, plain, model.apply)),
        facts=facts(dataset, parts),
        warnings=tuple(warnings(federation)),
        smoothness=known,
    )


def _model(config: Config, dataset: Dataset, loss: str) -> models.Model:
    choice = config.model
    if dataset.kind not in _KINDS[loss]:
        raise ConfigError(
            f'model.loss: "{loss}" is not for {dataset.kind} targets; it needs '
            f"{' or '.join(_KINDS[loss])}"
        )
    options = choice.model_dump(exclude={"name", "l2", "loss"})
    name = getattr(choice, "name")  # noqa: B009
    if (name == "char_rnn") != (dataset.kind == "sequence"):
        kind = "sequences" if name == "char_rnn" else "single rows"
        raise ConfigError(
            f'model.name: "{name}" is for {kind}, not for {dataset.kind} targets'
        )
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


def _check_lists(options: Any, clients: int) -> None:
    tune, personal = (getattr(options, name, None) for name in ("tune", "personal"))
    for where, values in (
        ("algorithm.steps", options.steps),
        ("algorithm.alpha", options.alpha),
        ("algorithm.lam", getattr(options, "lam", None)),
        ("algorithm.tune.steps", getattr(tune, "steps", None)),
        ("algorithm.personal.steps", getattr(personal, "steps", None)),
    ):
        if isinstance(values, list) and len(values) != clients:
            raise ConfigError(
                f"{where}: {len(values)} numbers for {clients} clients; give one for "
                "each, or a single one"
            )


def _measures(
    config: Config, dataset: Dataset, loss: Loss, apply: Apply
) -> Mapping[str, Callable]:
    """The measures asked for, or the usual ones; loss is without the l2 term."""
    asked = config.measure.metrics
    if asked is None:
        return metrics.standard(dataset.kind, loss, apply)
    builders: dict[str, Callable] = {
        "accuracy": metrics.next_token_accuracy
        if dataset.kind == "sequence"
        else metrics.accuracy,
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
