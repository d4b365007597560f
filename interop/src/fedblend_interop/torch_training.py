# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a PyTorch module does in training and not in evaluation.

It runs once in training mode, on a copy, and what it draws or averages over rows is
noted with the layer that does so, be it a layer of its own or a function called inside
of one. What the user switches off is in evaluation mode in training, too.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fedblend.errors import InputError, UserError
from fedblend_interop.torch_program import example_errors

if TYPE_CHECKING:
    from torch import Tensor, nn

RANDOM = ("bernoulli", "native_dropout", "rrelu_with_noise")
"""Parts of the names of operators that draw, as dropout does."""


def observe(
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

    shared: dict[int, Any] = {id(one): one for one in module.parameters()}
    watched = copy.deepcopy(module, shared).train(training)  # buffers may change
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


def _check_dropout(key: str, value: Any) -> Any:
    if value not in ("off", None):
        raise UserError(key, value, '"off" or None')
    return value


Off = Annotated[Literal["off"] | None, _check_dropout]
"""Whether a module with dropout is trained without it."""


def refuse_dropout(caller: str, name: str, dropout: Off, place: str) -> None:
    """Refuse a module with dropout in this place, unless the user switched it off."""
    if dropout is None:
        raise InputError(
            f"{caller}: {name} uses dropout, {place}; a model of fedblend computes the "
            'same in training and evaluation: dropout="off" trains without it'
        )


def module_in_training(
    name: str,
    module: "nn.Module",
    example: tuple["Tensor", ...],
    dropout: Off,
    freeze_batch_norm: bool,
) -> "nn.Module | None":
    """A copy of the module in training mode; None if it is the same in evaluation.

    Raises:
        InputError: rows depend on each other in evaluation, a running mean has no
            momentum, or a layer has one of single rows.
    """
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    for path, layer in module.named_modules():
        tracked = isinstance(layer, _InstanceNorm) and layer.track_running_stats
        if tracked and not freeze_batch_norm:
            raise InputError(
                f"from_torch: {name} has {type(layer).__name__} at {path!r} with "
                "track_running_stats=True, whose statistics no step here moves; "
                "without it each row has its own in evaluation, too"
            )
    drawing, averaging = observe(module, example, training=True)
    _, always = observe(module, example, training=False)
    if always:
        raise InputError(
            f"from_torch: {name} has {layers(always)}, which takes the statistics of "
            "the batch in evaluation too, so that rows depend on each other; normalize "
            "within a row instead (GroupNorm, LayerNorm)"
        )
    off = (drawing if dropout == "off" else {}) | (
        averaging if freeze_batch_norm else {}
    )
    if (drawing | averaging).keys() <= off.keys():
        return None
    trained = copy.deepcopy(module).train()
    for path in off:
        trained.get_submodule(path).training = False
    for path, layer in trained.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training and layer.momentum is None:
            raise InputError(
                f"from_torch: {name} has {type(layer).__name__} at {path!r} with "
                "momentum=None, a mean over all batches; give a momentum, such as 0.1"
            )
    return trained


def layers(found: Mapping[str, str]) -> str:
    """The first of some layers, and how many more there are.

    >>> layers({"conv.2": "Dropout", "6": "Dropout"})
    "Dropout at 'conv.2' and in 1 more place"
    """
    path, kind = next(iter(found.items()))
    more = len(found) - 1
    end = f" and in {more} more place{'s' * (more > 1)}" if more else ""
    return f"{kind}{f' at {path!r}' if path else ''}{end}"
