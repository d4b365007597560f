# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a module does in training that a model of fedblend does not do.

A model has no random key and no state besides its parameters. The module runs once in
training mode, on a copy, and what it draws or averages over rows is noted with the
layer that does so, be it a layer of its own or a function called inside of one.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedblend.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

RANDOM = ("bernoulli", "native_dropout", "rrelu_with_noise")
"""Parts of the names of operators that draw, as dropout does."""


class ExampleError(InputError):
    """A module does not take the rows of the example."""


@contextmanager
def example_errors(
    module: "nn.Module", example: tuple["Tensor", ...]
) -> Iterator[None]:
    """Errors of running a module on the example inside, as an ``ExampleError``."""
    try:
        yield
    except Exception as error:
        sizes = " and ".join(str(tuple(one.shape)) for one in example)
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ExampleError(
            f"from_torch: {type(module).__name__} does not take the example, of shape "
            f"{sizes}: {why}"
        ) from None


def observed(
    module: "nn.Module", example: tuple["Tensor", ...], training: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The layers that draw, and those that use statistics of the batch.

    By the layer's path in the module: the name of its class.

    Raises:
        ExampleError: the module does not take the example.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    drawing: dict[str, str] = {}
    averaging: dict[str, str] = {}
    inside: list[tuple[str, str]] = []

    class Observer(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = str(func)
            path, kind = inside[-1] if inside else ("", "")
            if any(word in name for word in RANDOM):
                drawing.setdefault(path, kind)
            # An instance norm is one row that has the channels of all rows.
            if "batch_norm" in name and _uses_batch(args) and args[0].shape[0] > 1:
                averaging.setdefault(path, kind)
            return func(*args, **(kwargs or {}))

    def enter(path: str, layer: "nn.Module"):
        layer.register_forward_pre_hook(
            lambda *_: inside.append((path, type(layer).__name__))
        )
        layer.register_forward_hook(lambda *_: inside.pop() and None)

    watched = copy.deepcopy(module).train(training)
    for path, layer in watched.named_modules():
        enter(path, layer)
    with (
        example_errors(module, example),
        torch.random.fork_rng(),
        torch.no_grad(),
        Observer(),
    ):
        watched(*example)
    return drawing, averaging


def _uses_batch(arguments: tuple) -> bool:
    """Whether a batch normalization uses the rows at hand: its argument ``training``.

    It is the only one that is true or false.
    """
    return any(one is True for one in arguments)


def refuse_training_only(
    name: str,
    module: "nn.Module",
    example: tuple["Tensor", ...],
    dropout: str,
    freeze_batch_norm: bool,
) -> None:
    """Refuse a module that is another one in training, unless the user said so.

    Raises:
        InputError: one line, with the layers.
    """
    drawing, averaging = observed(module, example, training=True)
    if drawing and dropout != "off":
        raise InputError(
            f"from_torch: {name} uses dropout, in {layers(drawing)}; a model of "
            'fedblend computes the same in training and evaluation: dropout="off" '
            "trains without it"
        )
    _, always = observed(module, example, training=False)
    if always:
        raise InputError(
            f"from_torch: {name} has {layers(always)}, which takes the statistics of "
            "the batch in evaluation too, so that rows depend on each other; normalize "
            "within a row instead (GroupNorm, LayerNorm)"
        )
    if averaging and not freeze_batch_norm:
        raise InputError(
            f"from_torch: {name} has {layers(averaging)}, whose running statistics can "
            "be neither mixed nor averaged; normalize within a row instead (GroupNorm, "
            "LayerNorm), or freeze_batch_norm=True keeps the stored statistics"
        )


def layers(found: Mapping[str, str]) -> str:
    """The first of some layers, and how many more there are.

    >>> layers({"conv.2": "Dropout", "6": "Dropout"})
    "Dropout at 'conv.2' and in 1 more place"
    """
    path, kind = next(iter(found.items()))
    more = len(found) - 1
    end = f" and in {more} more place{'s' * (more > 1)}" if more else ""
    return f"{kind}{f' at {path!r}' if path else ''}{end}"
