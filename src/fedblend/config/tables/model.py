# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[model]``: a model by its name or import path, its loss, its form.

The options of a model are those of its builder, and have the types of their defaults.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_origin

import jax
import jax.numpy as jnp
from pydantic import ConfigDict, model_validator

from fedblend import losses, models
from fedblend.config.imports import import_function, one_line_errors
from fedblend.config.table import (
    Content,
    Count,
    NotNegative,
    Table,
    Word,
    one_of_or_imported,
    one_word,
    refuse_first,
    tag_table,
)
from fedblend.config.tables.data import dataset_facts
from fedblend.core import Loss
from fedblend.data.dataset import Task
from fedblend.data.federated import FederatedData
from fedblend.errors import ConfigError, InputError, SettingError
from fedblend.extras import require
from fedblend.mixing import Apply
from fedblend.models import MODELS
from fedblend.models.derived import Products
from fedblend.models.model import SWITCHES, change_unit
from fedblend.theory import constants
from fedblend.theory.constants import Smoothness

if TYPE_CHECKING:
    from fedblend.config.config import Config


class LossFacts(NamedTuple):
    """What a loss is for."""

    kinds: tuple[str, ...]
    """The targets it takes."""
    outputs: str | None
    """What an ensemble averages; None where there is no ensemble."""


LOSSES = {
    "cross_entropy": LossFacts(("classes", "binary"), "classes"),
    "logistic": LossFacts(("binary",), "classes"),
    "squared_error": LossFacts(("regression",), "values"),
    "poisson": LossFacts(("counts",), None),
    "sequence_cross_entropy": LossFacts(("sequence",), "classes"),
    "multilabel": LossFacts(("tags",), "tags"),
}
USUAL_LOSSES = {
    "classes": "cross_entropy",
    "binary": "logistic",
    "regression": "squared_error",
    "counts": "poisson",
    "sequence": "sequence_cross_entropy",
    "tags": "multilabel",
}
"""The losses by the kind of targets."""
LINEAR = tuple(name for name, info in MODELS.items() if info.linear)
"""Models that are linear in their inputs."""
OWN_LOSSES = {info.loss: name for name, info in MODELS.items() if info.loss}
"""Models that have a loss for themselves, by that loss."""
CONSTANTS = {
    "logistic": constants.logistic,
    "cross_entropy": constants.softmax,
    "squared_error": constants.least_squares,
}
"""The constants of the clients' losses that theory knows, of linear models by loss."""
_OF_LINEAR = {"head": ["bias"], "body": ["weight"]}
"""A linear model is a single layer: its head is the intercept."""
ENSEMBLE = 3
"""Models of an ensemble where an algorithm needs one: the number of FedEM's authors."""
WITH_ADAPTERS = "mlp"
"""In place of a linear model, where an algorithm trains adapters."""

if TYPE_CHECKING:
    LossName = str
else:
    LossName = one_word(tuple(LOSSES))


class ModelChoice(Table):
    """A model by name; subclasses add its own options."""

    l2: NotNegative = 0.0
    loss: LossName | None = None
    ensemble: Count | None = None
    products: Products | None = None
    name: str


_COUNT_OR_NONE: Any = Count | None  # pyright: ignore[reportOperatorIssue]


def _model_table(name: str) -> type[ModelChoice]:
    parameters = inspect.signature(MODELS[name].builder).parameters

    def field_of(option: str, default: Any) -> tuple[Any, Any]:
        if isinstance(default, tuple):
            return list[Count], list(default)
        if default is None:
            return _COUNT_OR_NONE, default
        annotation = parameters[option].annotation
        return annotation if get_origin(annotation) is Union else type(default), default

    options: dict[str, Any] = {
        option: field_of(option, default)
        for option, default in MODELS[name].options.items()
        if option not in ("dtype", "ranks")  # [run] precision and data decide
    }
    return tag_table(name, ModelChoice, **options)


NAMED_MODELS = tuple(map(_model_table, MODELS))
"""The tables of the models by name."""


class ImportedModel(ModelChoice):
    """A model by import path; all other keys are arguments of the function."""

    model_config = ConfigDict(extra="allow")

    import_from: Word | None = None

    @model_validator(mode="before")
    @classmethod
    def _knows_all_keys(cls, content: Any) -> Any:
        return content

    @property
    def function(self) -> Callable[..., Any]:
        """The function that the name means; this imports its module."""
        return import_function(self.name, self.import_from)


if TYPE_CHECKING:
    AnyModel = ModelChoice
else:
    AnyModel = one_of_or_imported(NAMED_MODELS, ImportedModel)


def usual_model(data: Content, adapters: bool) -> str:
    """The model of a configuration that names none; ``adapters`` are trained."""
    shape, known = data.get("shape"), dataset_facts(data)
    if isinstance(shape, list) and len(shape) > 1:
        return "cnn"
    if known is not None and known.model is not None:
        return known.model
    two = known is not None and known.size.classes == 2
    return WITH_ADAPTERS if adapters else "logistic" if two else "softmax"


def check(config: "Config") -> None:
    """Refuse adapters without a layer for them."""
    name = config.model.name
    wrong = config.adapt is not None and name in LINEAR
    refuse_first((wrong, "adapt", f"{name} has no layer before its last one"))


def reads_ranks(config: "Config") -> bool:
    """Whether the model reads ranks of numbers, which preprocessing makes then."""
    name = config.model.name
    return name in MODELS and "ranks" in MODELS[name].options


def loss_name(config: "Config", task: Task) -> str:
    """The loss of ``[model]``, or the usual one of the task."""
    info = MODELS.get(config.model.name)
    return config.model.loss or (info and info.loss) or USUAL_LOSSES[task.kind]


def losses_of(config: "Config", apply: Apply, task: Task) -> tuple[Loss, Loss]:
    """The loss as it is measured, and as it is trained on.

    The latter has the l2 term, and is in the unit of the task.
    """
    plain, unit = getattr(losses, loss_name(config, task))(apply), task.loss_unit

    @wraps(plain)
    def scaled(params, rows, **more):
        return plain(params, rows, **more) / unit

    loss = plain if unit == 1 else scaled
    return plain, losses.l2(loss, config.model.l2) if config.model.l2 else loss


def some_inputs(task: Task, precision: str) -> jax.ShapeDtypeStruct:
    """The shape of two rows of inputs."""
    kind = jnp.int32 if task.kind == "sequence" else jnp.dtype(precision)
    return jax.ShapeDtypeStruct((2, *task.shape), kind)


def model_of(config: "Config", task: Task) -> models.Model:
    """The model of a configuration, for the task.

    It has the unit of the task, adapters, and the form that the algorithm asks for,
    such as an ensemble of several.
    """
    choice, precision = config.model, config.run.precision
    loss = loss_name(config, task)
    _check_task(choice, task, loss)
    outputs = 2 if task.kind == "binary" and loss == "cross_entropy" else task.outputs
    if isinstance(choice, ImportedModel):
        model = _import_model(choice, task, outputs, precision)
    else:
        model = _build_model(choice, task, outputs, precision)
    if choice.products is not None:
        model = models.set_products(model, choice.products)
    if (task.center, task.scale) != (0, 1):
        model = change_unit(model, task.center, task.scale)
    if config.adapt is not None:
        rows, described = some_inputs(task, precision), [choice.model_dump(), loss]
        described.append(str(task))
        adapters = require("fedblend_adapters.configured", "adapt", extra="adapters")
        model = adapters.adapt_model(config.adapt, model, rows, described)
    return _change_form(config, model, task, loss)


def _check_task(choice: ModelChoice, task: Task, loss: str) -> None:
    """Refuse a model or a loss that is not for the targets."""
    name, kind, kinds = choice.name, task.kind, LOSSES[loss].kinds
    info, owner = MODELS.get(name), OWN_LOSSES.get(loss, name)
    sequences = info is not None and info.sequences
    linear, form = name == "logistic", "sequences" if sequences else "single rows"
    for wrong, line in (
        (
            kind not in kinds,
            f'loss: "{loss}" is not for {kind} targets; it needs {" or ".join(kinds)}',
        ),
        (
            linear and kind == "regression" and choice.loss is None,
            'name: "logistic" is for two classes, and the targets are real numbers; '
            'data.kind = "binary" takes two numbers as classes, model.loss = '
            '"squared_error" makes it a linear model',
        ),
        (
            owner != name,
            f"loss: \"{loss}\" is {owner}'s, not {name}'s",
        ),
        (
            info is not None and sequences != (kind == "sequence"),
            f'name: "{name}" is for {form}, not for {kind} targets',
        ),
        (
            linear and kind == "binary" and loss == "cross_entropy",
            'loss: "cross_entropy" needs a score for each class, and logistic has a '
            "single one",
        ),
    ):
        if wrong:
            raise ConfigError(f"model.{line}")


def _build_model(
    choice: ModelChoice, task: Task, outputs: int, precision: str
) -> models.Model:
    """The model of that name."""
    options = choice.model_dump(exclude=set(ModelChoice.model_fields))
    options["dtype"] = jnp.dtype(precision)
    if "ranks" in MODELS[choice.name].options:
        options["ranks"] = task.ranks
    try:
        return models.build(choice.name, task.shape, outputs, **options)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None


def _import_model(
    choice: ImportedModel, task: Task, outputs: int, precision: str
) -> models.Model:
    """The model that a function of the user's own returns.

    It is called as ``function(shape, outputs, **options)``.

    Raises:
        ConfigError: one line: the function cannot be called so, fails, or returns
            nothing that is a model.
    """
    try:
        function = choice.function
        parameters = inspect.signature(function).parameters
        options = dict(choice.model_extra or {})
        switches = {
            name: options.pop(name)
            for name in SWITCHES
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
            integers=task.kind == "sequence",
            precision=precision,
            switches=switches,
        )
    except InputError as error:
        own = isinstance(error, SettingError) and error.key == "name"
        where = "model." if own else f'model.name: "{choice.name}": '
        raise ConfigError(f"{where}{error}") from None


def _change_form(
    config: "Config", model: models.Model, task: Task, loss: str
) -> models.Model:
    """The model in the form that the algorithm asks for, or several of it."""
    number, options = config.model.ensemble, config.algorithm
    if number is None and options.entry.form == "ensemble":
        number = ENSEMBLE
    if number is None:
        return model
    outputs = LOSSES[loss].outputs
    if outputs is None:
        raise ConfigError(
            f'model.ensemble: no ensemble can be made of models with loss "{loss}"'
        )
    return models.ensemble(model, number, outputs=outputs)


def name_parts(config: "Config", model: models.Model, task: Task) -> "Config":
    """The configuration with the names of parameters in place of a word like "head".

    Raises:
        ConfigError: the model has no such part.
    """
    options = config.algorithm
    key = options.entry.keeps
    word = key and getattr(options, key)
    if not isinstance(word, str) or key is None:
        return config
    if config.model.name in LINEAR and word in _OF_LINEAR:
        names = _OF_LINEAR[word]
    else:
        rows = some_inputs(task, config.run.precision)
        try:
            names = models.find_part(model, rows, word)
        except SettingError as error:
            can = word == "normalization" and hasattr(config.model, "norm")
            more = "; model.norm = true adds layers of it" if can else ""
            raise ConfigError(f"algorithm.{key}: {error.why}{more}") from None
    changed = options.model_copy(update={key: names})
    return config.model_copy(update={"algorithm": changed})


def smoothness(
    choice: ModelChoice, loss: str, federated_data: FederatedData
) -> Smoothness | None:
    """L_i and mu_i of every client, or None where they are not known.

    Args:
        choice: the table ``[model]``.
        loss: the name of the loss.
        federated_data: the clients' rows.
    """
    if not has_constants(choice, loss):
        return None
    return CONSTANTS[loss](federated_data, choice.l2, choice.model_dump()["intercept"])


def has_constants(choice: ModelChoice, loss: str) -> bool:
    """Whether theory has constants for a model and the loss of that name."""
    one = choice.name in LINEAR and choice.ensemble is None
    return one and loss in CONSTANTS
