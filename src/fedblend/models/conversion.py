# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a user's function returns, as a model: a pair, or a module of a framework."""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedblend.errors import InputError
from fedblend.models.frameworks import from_equinox, from_flax, from_keras
from fedblend.models.model import Model, Shape
from fedblend.models.torch.inspection import ExampleError
from fedblend.models.torch.module import from_torch

KINDS = (
    "a Model, a pair (init, apply), or a module of PyTorch, Flax NNX, Equinox or Keras"
)
SWITCHES = {
    "torch": ("dropout", "freeze_batch_norm"),
    "flax": ("dropout",),
    "equinox": ("dropout",),
    "keras": ("dropout",),
}
"""The options of these functions, by framework."""


def framework_of(value: Any) -> str | None:
    """The framework whose module a value is; None if it is none.

    Frameworks that nobody has imported are not imported.
    """
    for name, classes in (
        ("torch", "nn.Module"),
        ("flax", "nnx.Module"),
        ("equinox", "Module"),
        ("keras", "Model"),
    ):
        kind: Any = sys.modules.get(name)
        for part in classes.split("."):
            kind = getattr(kind, part, None)
        if isinstance(kind, type) and isinstance(value, kind):
            return name
    return None


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
    made = make()
    framework = framework_of(made)
    known = SWITCHES.get(framework or "", ())
    for name in switches or {}:
        if name not in known:
            raise InputError(f"{name}: is not for {_described(made)}")
    options = dict(switches or {})
    if framework == "torch":
        return _from_torch(make, shape, integers, precision, options)
    if framework is not None:
        convert = {"flax": from_flax, "equinox": from_equinox, "keras": from_keras}
        return convert[framework](made, **options)
    if isinstance(made, Model):
        return made
    if isinstance(made, tuple) and len(made) == 2 and all(map(callable, made)):
        return Model(*made)
    raise InputError(f"returned {_described(made)}, which is not {KINDS}")


def _described(made: Any) -> str:
    if made is None:
        return "nothing"
    kind = type(made)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {where}{kind.__qualname__}"


def _from_torch(
    make: Callable[[], Any],
    shape: Shape,
    integers: bool,
    precision: str,
    options: dict[str, Any],
) -> Model:
    """With rows as the module takes them: PyTorch's images have channels first."""
    double = precision == "float64"

    def source():
        module = make()
        return module.double() if double else module

    refused = None
    for own in _layouts(shape):
        example = np.zeros((2, *own), np.int32 if integers else precision)
        try:
            return from_torch(source, example, **options)
        except ExampleError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _layouts(shape: Shape) -> Iterator[Shape]:
    """Shapes of rows to try: PyTorch's of an image, the data's own, flat."""
    if len(shape) == 3:
        yield shape[-1], *shape[:-1]
    yield shape
    if len(shape) == 2:
        yield 1, *shape
    if len(shape) > 1:
        yield (int(np.prod(shape)),)
