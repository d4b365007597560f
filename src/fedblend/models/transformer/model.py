# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers by name: scores of the next token, or of the classes of a row."""

import jax.numpy as jnp

from fedblend.checks import COUNT, gate
from fedblend.models.model import Model, Shape, model, of_halves
from fedblend.models.transformer.architecture import Architecture
from fedblend.models.transformer.forward import features, scores
from fedblend.models.transformer.parameters import start, start_prefix


def build_transformer(form: Architecture, *, dtype=jnp.float32) -> Model:
    """The transformer of an architecture.

    Args:
        form: its sizes and kinds.
        dtype: of the parameters and of products; with bfloat16, normalizations, the
            softmax and scores are float32.

    Example:
        >>> import jax
        >>> model = build_transformer(Architecture(20, width=8, layers=2, heads=2))
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jnp.zeros((3, 5), jnp.int32)).shape
        (3, 5, 20)
    """
    made = of_halves(
        lambda key: start(form, key, dtype),
        lambda params, rows: features(form, params, rows),
        scores,
    )
    return made._replace(
        prefix=lambda key, length: start_prefix(form, key, length, dtype)
    )


def _sequences(name: str, shape: Shape) -> int:
    if len(shape) != 1:
        raise ValueError(
            f"{name}: rows of shape {tuple(shape)} are no sequences, which are "
            "(length,)"
        )
    return shape[0]


def _next_token(shape: Shape, outputs: int) -> tuple[int, int]:
    return outputs, _sequences("transformer", shape)


def _classes(shape: Shape, outputs: int) -> tuple[int, int]:
    return outputs, _sequences("text_classifier", shape)


@model("next tokens: rotary positions, RMS norms, gated SiLU", _next_token)
def transformer(
    vocabulary: int,
    length: int = 1024,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    hidden: int | None = None,
    positions: str = "rotary",
    norm: str = "rms",
    activation: str = "silu_gated",
    bias: str = "none",
    tied: bool = True,
    remat: bool = False,
    unroll: bool = False,
    dtype=jnp.float32,
) -> Model:
    """Scores for the next token, [rows, length, vocabulary], at least float32.

    The scores of a place depend on the places up to it alone. ``Architecture`` has
    further options, for ``build_transformer``.

    Args:
        vocabulary: number of tokens; inputs are integers [rows, length] below it.
        length: places of the longest row, which learned positions need.
        width: of the states between layers.
        layers: number of layers.
        heads: of attention.
        kv_heads: heads of keys and values, a divisor of ``heads``; None for as many.
        hidden: width inside of the feedforward half; None for the usual one.
        positions: "rotary" or "learned".
        norm: "rms" or "layer".
        activation: "silu_gated", "gelu_gated", "gelu", "gelu_tanh" or "relu".
        bias: of products: "none", "attention", "hidden" or "all".
        tied: scores have the weights of the embedding.
        remat: compute the inside of layers again for the gradient; saves memory.
        unroll: compile every layer by itself; faster on a GPU.
        dtype: of the parameters; float32, float64 or bfloat16.

    The defaults with 2048 tokens have 1 053 824 parameters.

    Example:
        >>> import jax
        >>> model = transformer(80, width=16, layers=2, kv_heads=2)
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jnp.zeros((2, 5), jnp.int32)).shape
        (2, 5, 80)
    """
    form = Architecture(
        vocabulary,
        length,
        width,
        layers,
        heads,
        kv_heads,
        hidden=hidden,
        positions=positions,
        norm=norm,
        activation=activation,
        bias=bias,
        tied=tied,
        remat=remat,
        unroll=unroll,
    )
    return build_transformer(form, dtype=dtype)


@model("classes of rows of tokens: a transformer that sees all places", _classes)
@gate(classes=COUNT)
def text_classifier(
    classes: int,
    length: int = 1024,
    *,
    vocabulary: int = 256,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    hidden: int | None = None,
    positions: str = "rotary",
    norm: str = "rms",
    activation: str = "silu_gated",
    bias: str = "none",
    pool: str = "mean",
    remat: bool = False,
    unroll: bool = False,
    dtype=jnp.float32,
) -> Model:
    """Scores of the classes of a row of tokens, [rows, classes], at least float32.

    Every place sees all places of its row that are not padding: a negative token is.

    Args:
        classes: number of scores.
        length: places of the longest row, which learned positions need.
        vocabulary: number of tokens; inputs are integers [rows, length] below it.
        width: of the states between layers.
        layers: number of layers.
        heads: of attention.
        kv_heads: heads of keys and values, a divisor of ``heads``; None for as many.
        hidden: width inside of the feedforward half; None for the usual one.
        positions: "rotary" or "learned".
        norm: "rms" or "layer".
        activation: "silu_gated", "gelu_gated", "gelu", "gelu_tanh" or "relu".
        bias: of products: "none", "attention", "hidden" or "all".
        pool: a row's features are the "mean" over its places, or the "first" one's.
        remat: compute the inside of layers again for the gradient; saves memory.
        unroll: compile every layer by itself; faster on a GPU.
        dtype: of the parameters; float32, float64 or bfloat16.

    Example:
        >>> import jax
        >>> model = text_classifier(3, vocabulary=80, width=16, layers=2)
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jnp.array([[4, 2, 7], [5, 1, -1]])).shape
        (2, 3)
    """
    form = Architecture(
        vocabulary,
        length,
        width,
        layers,
        heads,
        kv_heads,
        hidden=hidden,
        positions=positions,
        norm=norm,
        activation=activation,
        bias=bias,
        causal=False,
        classes=classes,
        pool=pool,
        remat=remat,
        unroll=unroll,
    )
    return build_transformer(form, dtype=dtype)
