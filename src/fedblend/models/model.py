# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A model is a pair of functions: ``init`` makes parameters, ``apply`` uses them.

Any such pair works everywhere in the library. The models of this package have in
common:

*Inputs* have the rows first. They may have any trailing shape with the right number of
entries (an image, or the same image flattened) and any dtype: the computation uses the
dtype of the parameters.

*Parameters* are named tuples of arrays, of the ``dtype`` given to the builder.

*In evaluation nothing is random, and rows do not depend on each other.* A model that
differs in training has ``apply(params, inputs, key=None, mask=None)``: with a key it
draws (dropout), and batch normalization takes the statistics of the rows that count.
Its running statistics are parameters, see ``batch_statistics``.

A model by name is declared once, beside its builder::

    @model("multilayer perceptron, 200-200 with ReLU", flat)
    def mlp(inputs: int, outputs: int, *, hidden=(200, 200)) -> Model: ...

Its options are the builder's keyword arguments.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from fedblend.core import Key, PyTree
from fedblend.errors import InputError, hint
from fedblend.extras import require
from fedblend.mixing import Apply
from fedblend.registry import Registry


class Model(NamedTuple):
    """``init(key) -> params`` and ``apply(params, inputs) -> outputs``.

    A model with a last layer may have its two halves as well, so that ``apply(params,
    inputs) = head(params, features(params, inputs))``: methods that work on features
    need them. Features are [rows, width], of sequences [rows, length, width].

    A model with attention may have ``prefix(key, length)``: learned keys and values
    that stand before those of every row. Its functions take ``Prefixed(params,
    prefix)`` in place of parameters.
    """

    init: Callable[[Key], PyTree]
    apply: Apply
    features: Apply | None = None
    head: Apply | None = None
    prefix: Callable[[Key, int], PyTree] | None = None


def join_halves(init: Callable[[Key], PyTree], features: Apply, head: Apply) -> Model:
    """The model of these two halves."""

    @wraps(features, assigned=(), updated=())
    def apply(params, inputs, **more):
        return head(params, features(params, inputs, **more))

    return Model(init, apply, features, head)


def change_unit(model: Model, center: float, scale: float) -> Model:
    """The model with outputs ``center + scale * outputs``, in the unit of targets."""

    def rescale(apply: Apply) -> Apply:
        @wraps(apply, assigned=(), updated=())
        def rescaled(params, inputs, **more):
            return center + scale * apply(params, inputs, **more)

        return rescaled

    head = None if model.head is None else rescale(model.head)
    return model._replace(apply=rescale(model.apply), head=head)


Builder = TypeVar("Builder", bound=Callable[..., Model])
Shape = tuple[int, ...]
Arguments = Callable[[Shape, int], tuple[Any, ...]]
"""From a row's shape and the number of outputs to a builder's positional arguments."""


def flat(shape: Shape, outputs: int) -> tuple[int, int]:
    """The arguments of a model of flattened rows: their entries, and the outputs."""
    return math.prod(shape), outputs


def image(shape: Shape, outputs: int) -> tuple[Shape, int]:
    """The arguments of a model of images: their shape, and the outputs."""
    return shape, outputs


class ModelInfo(NamedTuple):
    """A model by name."""

    name: str
    builder: Callable[..., Model]
    summary: str
    arguments: Arguments
    head: str = "last"
    """The part that stays with a client, unless a configuration names another."""
    linear: bool = False
    """Whether it is linear in its inputs."""
    sequences: bool = False
    """Whether it has scores at every place of a sequence."""
    rate: float | None = None
    """A usual learning rate; None for that of all models."""
    loss: str | None = None
    """The loss that it has for itself; None for that of its targets."""

    @property
    def options(self) -> dict[str, Any]:
        """The builder's keyword arguments, with their defaults."""
        parameters = inspect.signature(self.builder).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


MODELS: Registry[ModelInfo] = Registry("fedblend.models", plugins="fedblend.models")
"""The models of this package and of other distributions, by name."""


def model(
    summary: str, arguments: Arguments, **facts: Any
) -> Callable[[Builder], Builder]:
    """Register the model that the decorated function builds.

    Args:
        summary: what it is, in one line.
        arguments: of the builder, for rows of this shape and this number of outputs.
        facts: what else ``ModelInfo`` says.
    """

    def register(builder: Builder) -> Builder:
        MODELS.add(ModelInfo(builder.__name__, builder, summary, arguments, **facts))
        return builder

    return register


def build(name: str, shape: Shape, outputs: int, **options: Any) -> Model:
    """The model of this name for rows of inputs of ``shape``.

    Example:
        >>> import jax
        >>> model = build("mlp", (28, 28), 10, hidden=(30,))
        >>> model.apply(model.init(jax.random.key(0)), jax.numpy.ones((2, 784))).shape
        (2, 10)
    """
    if name not in MODELS:
        raise ValueError(f"model: {name!r} is unknown; {hint(name, MODELS)}")
    info = MODELS[name]
    for option in options:
        if option not in info.options:
            raise ValueError(
                f"{name}: no option {option!r}; {hint(option, info.options)}"
            )
    return info.builder(*info.arguments(shape, outputs), **options)


SWITCHES = ("dropout", "freeze_batch_norm")
"""The options that ``model_from`` takes for modules of other libraries."""
LIBRARIES = {
    "torch": ("nn.Module", "torch"),
    "flax": ("nnx.Module", "models"),
    "equinox": ("Module", "models"),
    "keras": ("Model", "keras"),
}
"""The class of each library's modules, and the extra of fedblend that converts them."""
NEEDED = (
    "a Model, a pair (init, apply), or a module of PyTorch, Flax NNX, Equinox or Keras"
)


def model_from(
    make: Callable[[], Any],
    shape: Shape,
    *,
    integers: bool = False,
    precision: str = "float32",
    switches: Mapping[str, Any] | None = None,
) -> Model:
    """The model of what a function returns.

    Args:
        make: the function; for a PyTorch module it is called again for every key, so
            that each seed has a start of its own.
        shape: of a row of inputs.
        integers: rows are numbers of classes or tokens.
        precision: of PyTorch's parameters.
        switches: options of the function that converts it, such as ``dropout="off"``.

    Raises:
        InputError: it returns nothing that is a model.
    """
    made, switches = make(), switches or {}
    library = find_library(made)
    if library is not None:
        needed, extra = f"a module of {library}", LIBRARIES[library][1]
        interop = require("fedblend_interop.frameworks", needed, extra=extra)
        return interop.convert_module(
            library, make, made, shape, integers, precision, switches
        )
    for name in switches:
        raise InputError(f"{name}: is not for {describe(made)}")
    if isinstance(made, Model):
        return made
    if isinstance(made, tuple) and len(made) == 2 and all(map(callable, made)):
        return Model(*made)
    raise InputError(f"returned {describe(made)}, which is not {NEEDED}")


def find_library(value: Any) -> str | None:
    """The library whose module a value is; None if it is none.

    A library that is not imported yet is not imported here.
    """
    for name, (classes, _) in LIBRARIES.items():
        kind: Any = sys.modules.get(name)
        for part in classes.split("."):
            kind = getattr(kind, part, None)
        if isinstance(kind, type) and isinstance(value, kind):
            return name
    return None


def describe(value: Any) -> str:
    """The kind of a value in words, such as "a torch.Tensor"."""
    if value is None:
        return "nothing"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    kind = kind.removeprefix("builtins.")
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
