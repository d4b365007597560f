# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers by name: scores of the next token, or of the classes of a row.

Weights start as those of GPT-2: normal with deviation 0.02, and less by the root of
twice the number of layers where a product is added to the states; biases at 0, factors
of normalizations at 1.

Reference:
    Radford, Wu, Child, Luan, Amodei, Sutskever. Language models are unsupervised
    multitask learners. 2019.
"""

import math

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.checks import COUNT, gate
from fedblend.core import Key
from fedblend.models.feedforward import Affine
from fedblend.models.model import Arguments, Model, Shape, join_halves, model
from fedblend_adapters.transformer_layers import (
    Architecture,
    Embedding,
    Layer,
    Prefix,
    Scaling,
    Scores,
    Transformer,
    features,
    scores,
)

DEVIATION = 0.02


def _sequences(name: str) -> Arguments:
    """The arguments of a model of rows of tokens: the outputs, and the length."""

    def arguments(shape: Shape, outputs: int) -> tuple[int, int]:
        if len(shape) != 1:
            raise ValueError(
                f"{name}: rows of shape {tuple(shape)} are not sequences, which are "
                "(length,)"
            )
        return outputs, shape[0]

    return arguments


_TOKENS = "next tokens: rotary positions, RMS norms, gated SiLU; or those of GPT-2"
_CLASSES = "classes of rows of tokens: a transformer that sees all places"


@model(_TOKENS, _sequences("transformer"), head="norm", sequences=True)
def transformer(
    vocabulary: int,
    length: int = 1024,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    hidden: int | None = None,
    kind: str = "llama",
    remat: bool = False,
    unroll: bool = False,
    dtype=jnp.float32,
) -> Model:
    """Scores for the next token, [rows, length, vocabulary], at least float32.

    The scores of a place depend on the places up to it alone.

    Args:
        vocabulary: number of tokens; inputs are integers [rows, length] below it.
        length: places of the longest row, which learned positions need.
        width: of the states between layers.
        layers: number of layers.
        heads: of attention.
        kv_heads: heads of keys and values, a divisor of ``heads``; None for as many.
        hidden: width inside of the feedforward half; None for the usual one.
        kind: "llama" for rotary positions, RMS norms, gated SiLU and no biases; "gpt2"
            for learned positions, layer norms, GELU by tanh, and biases.
        remat: compute the inside of layers again for the gradient; saves memory.
        unroll: compile every layer by itself; faster on a GPU.
        dtype: of the parameters and of products; float32, float64 or bfloat16.

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
        hidden,
        kind,
        remat,
        unroll,
    )
    return build_transformer(form, dtype)


@model(_CLASSES, _sequences("text_classifier"))
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
    kind: str = "llama",
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
        kind: "llama" for rotary positions, RMS norms, gated SiLU and no biases; "gpt2"
            for learned positions, layer norms, GELU by tanh, and biases.
        remat: compute the inside of layers again for the gradient; saves memory.
        unroll: compile every layer by itself; faster on a GPU.
        dtype: of the parameters and of products; float32, float64 or bfloat16.

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
        hidden,
        kind,
        remat,
        unroll,
        classes,
    )
    return build_transformer(form, dtype)


def build_transformer(form: Architecture, dtype) -> Model:
    """The transformer of an architecture.

    Args:
        form: its sizes and kinds.
        dtype: of the parameters and of products; with bfloat16, normalizations, the
            softmax and scores are float32.
    """
    made = join_halves(
        lambda key: _start(form, key, dtype),
        lambda params, rows: features(form, params, rows),
        scores,
    )
    return made._replace(
        prefix=lambda key, length: _start_prefix(form, key, length, dtype)
    )


def _start(form: Architecture, key: Key, dtype) -> Transformer:
    """The parameters at the start."""
    wide = jnp.promote_types(dtype, jnp.float32)

    def normal(name: str, *shape: int, deviation: float = DEVIATION):
        drawn = jax.random.normal(keys.named(key, name), shape, wide)
        return (deviation * drawn).astype(dtype)

    def scaling(*shape: int) -> Scaling:
        offset = None if form.llama else jnp.zeros(shape, dtype)
        return Scaling(jnp.ones(shape, dtype), offset)

    def product(name, inputs, outputs, deviation=DEVIATION) -> Affine:
        weight = normal(name, form.layers, outputs, inputs, deviation=deviation)
        bias = None if form.llama else jnp.zeros(weight.shape[:2], dtype)
        return Affine(weight, bias)

    narrow = DEVIATION / math.sqrt(2 * form.layers)
    heads, kv = form.heads * form.head_width, form.kv * form.head_width
    layers = Layer(
        scaling(form.layers, form.width),
        product("query", form.width, heads),
        product("key", form.width, kv),
        product("value", form.width, kv),
        product("out", heads, form.width, narrow),
        scaling(form.layers, form.width),
        product("gate", form.width, form.inner) if form.llama else None,
        product("up", form.width, form.inner),
        product("down", form.inner, form.width, narrow),
    )
    embedding = Embedding(
        normal("tokens", form.vocabulary, form.width),
        None if form.llama else normal("positions", form.length, form.width),
    )
    last = Scores(None, None)
    if form.classes is not None:
        weight = normal("last", form.classes, form.width)
        last = Scores(weight, jnp.zeros(form.classes, dtype))
    return Transformer(embedding, layers, scaling(form.width), last)


def _start_prefix(form: Architecture, key: Key, length: int, dtype) -> Prefix:
    """Keys and values of a prefix at the start, at least float32: they are trained."""
    shape = (form.layers, length, form.kv, form.head_width)
    wide = jnp.promote_types(dtype, jnp.float32)
    both = (keys.named(key, name) for name in Prefix._fields)
    return Prefix(*(DEVIATION * jax.random.normal(own, shape, wide) for own in both))
