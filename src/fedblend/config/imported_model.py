# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The model that a function of the user's own returns."""

import inspect

import jax.numpy as jnp

from fedblend import models
from fedblend.config.imports import one_line_errors
from fedblend.config.schema.imported import ImportedModel
from fedblend.config.schema.tables import ModelChoice
from fedblend.data.dataset import Task
from fedblend.errors import ConfigError, InputError, SettingError


def imported_model(
    choice: ModelChoice, task: Task, outputs: int, precision: str
) -> models.Model | None:
    """The model of an import path; None if the name of the model is no import path.

    The function is called as ``function(shape, outputs, **options)``.

    Raises:
        ConfigError: one line: the function cannot be called so, fails, or returns
            nothing that is a model.
    """
    if not isinstance(choice, ImportedModel):
        return None
    try:
        function = choice.function
        parameters = inspect.signature(function).parameters
        options = dict(choice.model_extra or {})
        switches = {
            name: options.pop(name)
            for name in models.SWITCHES["torch"]
            if name in options and name not in parameters
        }
        if "dtype" in parameters:
            options["dtype"] = jnp.dtype(precision)

        def make():
            with one_line_errors(choice.name):
                return function(task.shape, outputs, **options)

        return models.model_from(
            make,
            task.shape,
            integers=task.numbers or task.kind == "sequence",
            precision=precision,
            switches=switches,
        )
    except InputError as error:
        own = isinstance(error, SettingError) and error.key == "name"
        where = "model." if own else f'model.name: "{choice.name}": '
        raise ConfigError(f"{where}{error}") from None
