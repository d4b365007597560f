# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A small network for tables, on piecewise-linear inputs, and an additive model.

In the network a number enters three times: standardized, in the scores, which are
linear in it beside what the network adds; standardized, in the network; and in the
network as ``BINS`` entries ``clip((x - a) / (b - a), 0, 1)``, one for each bin from a
to b between quantiles. So a network that is small bends where the rows are, whatever
the unit of a column is. The scores of the additive model are linear in a number and in
its entries.

Preprocessing has the quantiles. It makes of each number its rank r, the place among the
edges of the bins; entry k of the bins is then ``clip(r - k, 0, 1)``, and the model has
no constants of the data: see ``data.preprocess``.

References:
    Gorishniy, Rubachev, Babenko. On Embeddings for Numerical Features in Tabular Deep
    Learning. NeurIPS 2022. https://arxiv.org/abs/2203.05556
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from fedblend.checks import COUNT, Number, gate
from fedblend.data.preprocess.preprocessing import BINS
from fedblend.models.feedforward import (
    DROPOUT,
    Affine,
    Mlp,
    Training,
    affine,
    flatten,
    linear,
)
from fedblend.models.model import Model, flat, join_halves, model

ADDITIVE_BINS = 8
HIDDEN = (64, 64)
"""Widths of the layers."""


def bin_entries(ranks: Any, bins: int = BINS) -> Any:
    """The entries of the bins of ranks, [rows, ranks * bins], of NumPy's or JAX's.

    Fewer bins than ranks are made of are so much wider.

    >>> bin_entries(np.array([[3.5], [16.0]]), 4)
    array([[0.875, 0.   , 0.   , 0.   ],
           [1.   , 1.   , 1.   , 1.   ]])
    """
    below = np.arange(bins, dtype=ranks.dtype)[None, None]
    each = (ranks[:, :, None] * (bins / BINS) - below).clip(0, 1)
    return each.reshape(ranks.shape[0], -1)


def hidden_features(
    params: Mlp,
    rows: jax.Array,
    ranks: int,
    drop: Callable[[int, jax.Array], jax.Array] = lambda place, here: here,
) -> jax.Array:
    """What the last layer reads: the network's features, then the inputs but ranks.

    Args:
        params: of ``tabular``.
        rows: of inputs.
        ranks: how many of the last inputs are ranks.
        drop: what becomes of the features of each layer while training.
    """
    inputs = flatten(rows, params.last.weight.dtype)
    plain, places = jnp.split(inputs, [inputs.shape[1] - ranks], axis=1)
    here = jnp.concatenate([plain, bin_entries(places)], axis=1)
    for place, layer in enumerate(params.hidden):
        here = drop(place, jax.nn.relu(linear(layer, here)))
    return jnp.concatenate([here, plain], axis=1)


@model("small network for tables, on ranks of numbers", flat, head="last/bias")
@gate(inputs=COUNT, outputs=COUNT, dropout=DROPOUT)
def tabular(
    inputs: int,
    outputs: int,
    *,
    ranks: int = 0,
    hidden: Sequence[int] = HIDDEN,
    dropout: float = 0.0,
    dtype=jnp.float32,
) -> Model:
    """A small network for tables; see the module's text.

    Args:
        inputs: number of entries of a row, ranks too.
        outputs: number of scores or values of a row.
        ranks: how many of the last entries are ranks of numbers, in bins; without any
            the network sees the inputs as they are.
        hidden: widths of the hidden layers.
        dropout: part of the hidden features that is zero in a training step.
        dtype: of the parameters.

    Hidden weights start as He's normal, all others at zero: the first prediction is
    that of a linear model before its first step.

    Example:
        >>> import jax
        >>> model = tabular(5, 1, ranks=2, hidden=(8,))
        >>> params = model.init(jax.random.key(0))
        >>> params.hidden[0].weight.shape, params.last.weight.shape
        ((8, 35), (1, 11))
    """
    plain, start = inputs - ranks, initializers.he_normal()
    widths = (plain + BINS * ranks, *hidden)

    def init(key):
        layers = [
            affine(start, jax.random.fold_in(key, place), before, after, dtype)
            for place, (before, after) in enumerate(pairwise(widths))
        ]
        weight = jnp.zeros((outputs, widths[-1] + plain), dtype)
        return Mlp(tuple(layers), (), Affine(weight, jnp.zeros((outputs,), dtype)))

    def features(params, rows, key=None):
        drop = Training(key, None, dropout).drop
        return hidden_features(params, rows, ranks, drop)

    def head(params, values):
        return linear(params.last, values)

    return join_halves(init, features, head)


@model("additive model: linear in numbers and in their bins", flat, head="bias")
@gate(inputs=COUNT, outputs=COUNT, bins=Number(least=1, most=BINS, whole=True))
def additive(
    inputs: int,
    outputs: int,
    *,
    ranks: int = 0,
    bins: int = ADDITIVE_BINS,
    dtype=jnp.float32,
) -> Model:
    """An additive model: the effect of each number is a line that bends between bins.

    Args:
        inputs: number of entries of a row, ranks too.
        outputs: number of scores or values of a row.
        ranks: how many of the last entries are ranks of numbers.
        bins: of each rank, at most those that ranks are made of.
        dtype: of the parameters.

    Example:
        >>> import jax
        >>> model = additive(5, 1, ranks=2, bins=4)
        >>> model.init(jax.random.key(0)).weight.shape
        (1, 11)
    """
    width = inputs + (bins - 1) * ranks

    def init(key):
        del key
        return Affine(jnp.zeros((outputs, width), dtype), jnp.zeros((outputs,), dtype))

    def apply(params, rows):
        entries = flatten(rows, params.weight.dtype)
        plain, places = jnp.split(entries, [inputs - ranks], axis=1)
        here = jnp.concatenate([plain, bin_entries(places, bins)], axis=1)
        return linear(params, here)

    return Model(init, apply)
