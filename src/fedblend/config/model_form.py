# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The form of the model: its unit, adapters, an ensemble, or use of features."""

from fedblend import models
from fedblend.config.adapt import adapted
from fedblend.config.config import Config
from fedblend.core import Loss
from fedblend.data.dataset import Task
from fedblend.errors import ConfigError
from fedblend.models.model import in_unit

ENSEMBLE = 3
"""Models of an ensemble where an algorithm needs one: the number of FedEM's authors."""
_OUTPUTS = {
    "cross_entropy": "classes",
    "logistic": "classes",
    "sequence_cross_entropy": "classes",
    "multilabel": "tags",
    "squared_error": "values",
}
"""What an ensemble averages, by the loss."""
_SCORES = ("cross_entropy", "logistic")
"""The losses of models with scores of classes."""


def in_scale(loss: Loss, task: Task) -> Loss:
    """A squared error in the unit of the task's scale; another loss as it is."""
    if task.scale == 1:
        return loss
    return lambda params, rows: loss(params, rows) / task.scale**2


def formed(config: Config, one: models.Model, task: Task, loss: str) -> models.Model:
    """The model in the form of its configuration.

    Args:
        config: names the algorithm, and the number of models of an ensemble.
        one: a single model.
        task: what its rows are like.
        loss: the name of its loss.
    """
    number, options = config.model.ensemble, config.algorithm
    if (task.center, task.scale) != (0, 1):
        one = in_unit(one, task.center, task.scale)
    if config.adapt is not None:
        described = [config.model.model_dump(), loss]
        one = adapted(config.adapt, one, task, config.run.precision, described)
    if options.entry.form in ("shifted", "neighbors"):
        if number is not None:
            raise ConfigError(f"model.ensemble: is not for {options.name}")
        if one.features is None:
            raise ConfigError(
                f'model.name: "{config.model.name}" does not say what its features '
                f"are, which {options.name} needs"
            )
        if options.entry.form == "shifted":
            return models.shifted(one, task.shape)
        if loss not in _SCORES:
            raise ConfigError(
                f'algorithm.name: "{options.name}" predicts classes, and is not for '
                f'loss "{loss}"'
            )
        return models.neighbors(one)
    if number is None and options.entry.form == "ensemble":
        number = ENSEMBLE
    if number is None:
        return one
    if loss not in _OUTPUTS:
        raise ConfigError(f'model.ensemble: there is none of models with loss "{loss}"')
    return models.ensemble(one, number, outputs=_OUTPUTS[loss])
