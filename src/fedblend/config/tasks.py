# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a configuration makes of a task: its loss, its model, its measures."""

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from fedblend import losses, metrics, models
from fedblend.config.config import Config
from fedblend.core import Loss
from fedblend.data.dataset import Task
from fedblend.errors import ConfigError
from fedblend.mixing import Apply

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
    "hinge": ("classes",),
}
_OWN_LOSSES = {"dual_encoder": "hinge"}
"""Of models that have a loss of their own."""
_METRICS = {
    "accuracy": ("classes", "binary", "sequence"),
    "auc": ("binary",),
    "mse": ("regression",),
    "recall": ("classes", "tags"),
}


def loss_name(config: Config, task: Task) -> str:
    """The loss of ``[model]``, or the usual one of the task."""
    own = _OWN_LOSSES.get(config.model.name, _LOSSES[task.kind])
    return config.model.loss or own


def losses_of(config: Config, name: str, apply: Apply) -> tuple[Loss, Loss]:
    """The loss of that name as it is measured, and with the l2 term, as trained on."""
    if name == "hinge":
        plain = models.dual_encoder_loss()
    else:
        plain = getattr(losses, name)(apply)
    return plain, losses.l2(plain, config.model.l2) if config.model.l2 else plain


def model_of(config: Config, task: Task, loss: str) -> models.Model:
    """The model of a configuration, for the task; ``loss`` is the name of its loss."""
    choice = config.model
    if task.kind not in _KINDS[loss]:
        raise ConfigError(
            f'model.loss: "{loss}" is not for {task.kind} targets; it needs '
            f"{' or '.join(_KINDS[loss])}"
        )
    options = choice.model_dump(exclude={"name", "l2", "loss"})
    name = config.model.name
    if name == "logistic" and task.kind == "regression" and choice.loss is None:
        raise ConfigError(
            'model.name: "logistic" is for two classes, and the targets are real '
            'numbers; data.kind = "binary" takes two numbers as classes, model.loss = '
            '"squared_error" makes it a linear model'
        )
    if loss == "hinge" and name != "dual_encoder":
        raise ConfigError(f"model.loss: \"hinge\" is dual_encoder's, not {name}'s")
    if (name == "char_rnn") != (task.kind == "sequence"):
        kind = "sequences" if name == "char_rnn" else "single rows"
        raise ConfigError(
            f'model.name: "{name}" is for {kind}, not for {task.kind} targets'
        )
    binary = task.kind == "binary"
    if binary and name == "logistic" and loss == "cross_entropy":
        raise ConfigError(
            'model.loss: "cross_entropy" needs a score for each class, and logistic '
            "has a single one"
        )
    outputs = 2 if binary and loss == "cross_entropy" else task.outputs
    try:
        return models.build(
            name,
            task.shape,
            outputs,
            **options,
            dtype=jnp.dtype(config.run.precision),
        )
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None


def measures_of(
    config: Config, task: Task, loss: Loss, apply: Apply
) -> Mapping[str, metrics.Metric]:
    """The metrics of ``[measure]``, or the usual ones; loss is without the l2 term."""
    names = config.measure.metrics
    if names is None:
        return metrics.standard(task.kind, loss, apply)
    builders: dict[str, Callable] = {
        "accuracy": metrics.next_token_accuracy
        if task.kind == "sequence"
        else metrics.accuracy,
        "auc": metrics.auc,
        "mse": metrics.mean_squared_error,
    }
    chosen = {}
    for place, name in enumerate(names):
        word, _, number = name.partition("@")
        key = f'measure.metrics.{place}: "{name}"'
        if task.kind not in _METRICS.get(word, (task.kind,)):
            raise ConfigError(
                f"{key} is not for {task.kind} targets; it needs "
                f"{' or '.join(_METRICS[word])}"
            )
        if number and int(number) > task.outputs:
            raise ConfigError(f"{key}: there are only {task.outputs} classes")
        if word == "loss":
            chosen[name] = metrics.mean_loss(loss)
        elif number:
            chosen[name] = metrics.recall_at(apply, int(number))
        else:
            chosen[name] = builders[word](apply)
    return chosen
