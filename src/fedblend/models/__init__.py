# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models: plain JAX ones, by name or by builder, and adapters for other frameworks."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from fedblend.models.adapters import from_equinox, from_flax
from fedblend.models.char_rnn import char_rnn
from fedblend.models.cnn import cnn, large_cnn
from fedblend.models.dual_encoder import dual_encoder, dual_encoder_loss, spreadout
from fedblend.models.linear import logistic, softmax
from fedblend.models.mlp import mlp
from fedblend.models.model import Model, flat_size

__all__ = [
    "MODELS",
    "Model",
    "ModelInfo",
    "build",
    "char_rnn",
    "cnn",
    "dual_encoder",
    "dual_encoder_loss",
    "from_equinox",
    "from_flax",
    "large_cnn",
    "logistic",
    "mlp",
    "softmax",
    "spreadout",
]


class ModelInfo(NamedTuple):
    """A model by name.

    ``make(shape, outputs, **options)`` builds it for rows of inputs of ``shape``;
    ``options`` are the names of the options with their defaults.
    """

    make: Callable[..., Model]
    description: str
    options: dict[str, Any]


def _softmax(shape: tuple[int, ...], outputs: int, **options) -> Model:
    return softmax(flat_size(shape), outputs, **options)


def _logistic(shape: tuple[int, ...], outputs: int, **options) -> Model:
    if outputs not in (1, 2):
        raise ValueError(
            f"logistic: {outputs} outputs, it has a single score (1 output, 2 classes)"
        )
    return logistic(flat_size(shape), **options)


def _mlp(shape: tuple[int, ...], outputs: int, **options) -> Model:
    return mlp(flat_size(shape), outputs, **options)


def _char_rnn(shape: tuple[int, ...], outputs: int, **options) -> Model:
    if len(shape) != 1:
        raise ValueError(
            f"char_rnn: rows of shape {tuple(shape)} are no sequences, which are "
            "(length,)"
        )
    return char_rnn(outputs, **options)


def _dual_encoder(shape: tuple[int, ...], outputs: int, **options) -> Model:
    if len(shape) != 1:
        raise ValueError(
            f"dual_encoder: rows of shape {tuple(shape)} are no lists of numbers, "
            "which are (length,)"
        )
    return dual_encoder(outputs - 1, **options)


def _info(make: Callable, builder: Callable, description: str) -> ModelInfo:
    """The entry of a model; its options are the builder's keyword arguments."""
    parameters = inspect.signature(builder).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return ModelInfo(make, description, options)


MODELS: dict[str, ModelInfo] = {
    "softmax": _info(_softmax, softmax, "softmax regression, starts at zero"),
    "logistic": _info(_logistic, logistic, "logistic regression, a single score"),
    "mlp": _info(_mlp, mlp, "multilayer perceptron, 200-200 with ReLU"),
    "cnn": _info(cnn, cnn, "APFL's network: convolutions 20-50, hidden 512"),
    "large_cnn": _info(large_cnn, large_cnn, "EMNIST's: convolutions 32-64, 128"),
    "char_rnn": _info(_char_rnn, char_rnn, "next characters: embedding 8, LSTM 2x256"),
    "dual_encoder": _info(_dual_encoder, dual_encoder, "next movie: embedding 16"),
}
"""The models that ship, by name."""


def build(name: str, shape: tuple[int, ...], outputs: int, **options) -> Model:
    """The model of this name for rows of inputs of ``shape``.

    Example:
        >>> import jax
        >>> model = build("mlp", (28, 28), 10, hidden=(30,))
        >>> model.apply(model.init(jax.random.key(0)), jax.numpy.ones((2, 784))).shape
        (2, 10)
    """
    if name not in MODELS:
        raise ValueError(_unknown("model", name, list(MODELS)))
    info = MODELS[name]
    for option in options:
        if option not in info.options:
            raise ValueError(_unknown(f"{name}: option", option, list(info.options)))
    return info.make(shape, outputs, **options)


def _unknown(what: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ","
    return f"{what} {name!r} is unknown{hint} known are {', '.join(known)}"
