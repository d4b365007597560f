# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The next-character network: an embedding, recurrent layers, scores at every place.

Place t of a row holds the number of a character; the scores of place t are those of the
character at t + 1, and depend on the places up to t alone. A layer has inputs x_t, a
state h (and c), which starts at zero, and weights stacked gate by gate::

    lstm   i, f, g, o = W x_t + U h + b        (order of the rows of W, U and b)
           c <- sigmoid(f) * c + sigmoid(i) * tanh(g)
           h <- sigmoid(o) * tanh(c)

    gru    r, z, n = W x_t + b,  r', z', n' = U h
           r <- sigmoid(r + r'),  z <- sigmoid(z + z')
           h <- (1 - z) * tanh(n + r * n') + z * h

As in Keras, the forget gate's bias starts at 1 and all others at 0, W starts as
Glorot's uniform, U orthogonal, and the embedding uniform in [-0.05, 0.05].

References:
    Reddi et al. Adaptive Federated Optimization. ICLR 2021.
    https://arxiv.org/abs/2003.00295 (embedding 8, two LSTM layers of 256)
    Caldas et al. LEAF: A Benchmark for Federated Settings. 2018.
    https://arxiv.org/abs/1812.01097
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import initializers, sigmoid

from fedblend.checks import COUNT, gate, words
from fedblend.core import Key, PyTree
from fedblend.models.feedforward import Affine, affine, linear
from fedblend.models.model import Model, Shape, model


class Recurrent(NamedTuple):
    """A layer: ``inputs`` is W, [gates * hidden, inputs], with b; ``state`` is U."""

    inputs: Affine
    state: jax.Array


class CharRnn(NamedTuple):
    """The embedding [vocabulary, width], the layers in order, and the scores."""

    embedding: jax.Array
    layers: tuple[Recurrent, ...]
    last: Affine


class _Cell(NamedTuple):
    """A kind of layer: number of gates, number of states, and its step.

    ``step(carry, given, state)`` takes the states, ``W x + b`` and U.
    """

    gates: int
    carried: int
    step: Callable[[PyTree, jax.Array, jax.Array], PyTree]


def _lstm(carry, given, state):
    hidden, memory = carry
    i, f, g, o = jnp.split(given + hidden @ state.T, 4, axis=-1)
    memory = sigmoid(f) * memory + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(memory), memory


def _gru(carry, given, state):
    (hidden,) = carry
    r, z, n = jnp.split(given, 3, axis=-1)
    r_state, z_state, n_state = jnp.split(hidden @ state.T, 3, axis=-1)
    keep = sigmoid(z + z_state)
    new = jnp.tanh(n + sigmoid(r + r_state) * n_state)
    return ((1 - keep) * new + keep * hidden,)


CELLS = {"lstm": _Cell(4, 2, _lstm), "gru": _Cell(3, 1, _gru)}


def _vocabulary(shape: Shape, outputs: int) -> tuple[int]:
    if len(shape) != 1:
        raise ValueError(
            f"char_rnn: rows of shape {tuple(shape)} are not sequences, which are "
            "(length,)"
        )
    return (outputs,)


@model(
    "next characters: embedding 8, LSTM 2x256", _vocabulary, sequences=True, rate=0.8
)
@gate(
    vocabulary=COUNT,
    embedding=COUNT,
    hidden=COUNT,
    layers=COUNT,
    cell=words(*CELLS),
)
def char_rnn(
    vocabulary: int,
    *,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    cell: str = "lstm",
    dtype=jnp.float32,
) -> Model:
    """Scores for the next character, [rows, length, vocabulary].

    Args:
        vocabulary: number of characters; inputs are integers [rows, length] below it.
        embedding: width of the embedding.
        hidden: width of a layer.
        layers: number of layers.
        cell: "lstm" or "gru".
        dtype: of the parameters.

    With 90 characters (the 86 of Reddi et al. and four marks) there are 820 522
    parameters; with the 80 of LEAF, 817 872.

    Example:
        >>> model = char_rnn(80, hidden=16)
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jnp.zeros((2, 5), jnp.int32)).shape
        (2, 5, 80)
    """
    kind = CELLS[cell]
    widths = [embedding, *[hidden] * (layers - 1)]

    def init(key):
        def own(place):
            return jax.random.fold_in(key, place)

        table = jax.random.uniform(
            own(0), (vocabulary, embedding), dtype, minval=-0.05, maxval=0.05
        )
        stack = [
            _start(kind, own(2 * place + 1), own(2 * place + 2), width, hidden, dtype)
            for place, width in enumerate(widths)
        ]
        glorot = initializers.glorot_uniform()
        last = affine(glorot, own(2 * layers + 1), hidden, vocabulary, dtype)
        return CharRnn(table, tuple(stack), last)

    def apply(params, rows):
        here = params.embedding[jnp.asarray(rows).astype(jnp.int32)]
        here = jnp.swapaxes(here, 0, 1)  # the scan is over places
        for layer in params.layers:
            here = _unroll(kind, layer, here)
        return linear(params.last, jnp.swapaxes(here, 0, 1))

    return Model(init, apply)


def _start(
    kind: _Cell, key: Key, state_key: Key, inputs: int, hidden: int, dtype
) -> Recurrent:
    """The initial layer."""
    width = kind.gates * hidden
    given = affine(initializers.glorot_uniform(), key, inputs, width, dtype)
    if kind.gates == 4:
        forget = given.bias.at[hidden : 2 * hidden].set(1)  # pyright: ignore
        given = given._replace(bias=forget)
    state = initializers.orthogonal()(state_key, (width, hidden), dtype)
    return Recurrent(given, state)


def _unroll(kind: _Cell, layer: Recurrent, inputs: jax.Array) -> jax.Array:
    """The layer's states at all places, [length, rows, hidden].

    ``W x + b`` is one product for all places, outside of the loop.
    """
    rows, hidden = inputs.shape[1], layer.state.shape[1]
    zero = jnp.zeros((rows, hidden), layer.state.dtype)

    def step(carry, given):
        carry = kind.step(carry, given, layer.state)
        return carry, carry[0]

    given = linear(layer.inputs, inputs)
    _, states = jax.lax.scan(step, (zero,) * kind.carried, given)
    return states
