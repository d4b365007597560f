# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The dual encoder for the next movie: two towers over one table of embeddings.

A row is (context, label): the numbers of up to ten movies that a user rated in this
order, filled up with ``PAD``, and the number of the next movie. With E the table::

    context  c = normal(relu(W mean(E[movies that are not PAD]) + b))
    label    l = normal(E[label])                  normal(x) = x / |x|
    loss     max(0, 0.9 - c^T l)^2                 on the right label alone
    scores   c^T normal(E[j]) for every row j, -1 for PAD

No example pushes embeddings apart, so that with this loss alone all of them may become
the same. ``spreadout`` pushes them apart, a function of the parameters that needs no
data, for the server of Mixed FL::

    spreadout  lambda |S - diag(S)|_F,   S = N N^T,   N = normal(E) without PAD

S is never computed: |N N^T|_F = |N^T N|_F, a matrix as wide as the embeddings.

Where this differs from the paper: it says neither the margin, lambda, the width nor how
the table starts. E starts uniform in [-0.05, 0.05], W as Glorot's uniform, b at zero.

References:
    Augenstein et al. Mixed Federated Learning: Joint Decentralized and Centralized
    Learning. 2022. https://arxiv.org/abs/2205.13655
    Zhang et al. Learning Spread-Out Local Feature Descriptors. ICCV 2017.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import initializers

from fedblend.checks import COUNT, gate
from fedblend.core import Loss, PyTree
from fedblend.mixing import predict
from fedblend.models.feedforward import Affine, affine, linear
from fedblend.models.model import Model

PAD = 0
"""The number that fills up a short context."""

MARGIN = 0.9
"""Cosines above it have no loss."""


class DualEncoder(NamedTuple):
    """The table [movies + 1, width], row 0 being ``PAD``'s, and the context's layer."""

    embedding: jax.Array
    dense: Affine


@gate(movies=COUNT, width=COUNT)
def dual_encoder(movies: int = 3952, *, width: int = 16, dtype=jnp.float32) -> Model:
    """Scores of all movies as the next one, [rows, movies + 1], cosines.

    Args:
        movies: number of movies, which are numbered from 1.
        width: of the embeddings and of the layer.
        dtype: of the parameters.

    With MovieLens 1M's 3952 movies there are 63 520 parameters.

    Example:
        >>> model = dual_encoder(20)
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jnp.array([[3, 7, 0], [5, 0, 0]])).shape
        (2, 21)
    """

    def init(key):
        table = jax.random.uniform(
            jax.random.fold_in(key, 0), (movies + 1, width), dtype, -0.05, 0.05
        )
        glorot = initializers.glorot_uniform()
        dense = affine(glorot, jax.random.fold_in(key, 1), width, width, dtype)
        return DualEncoder(table, dense)

    def apply(params, contexts):
        own = _context(params.dense, params.embedding[contexts], contexts)
        scores = own @ _normal(params.embedding).T
        return scores.at[:, PAD].set(-1)

    return Model(init, apply)


def dual_encoder_loss() -> Loss:
    """The squared hinge of every row's cosine, ``max(0, 0.9 - cosine)^2``.

    Rows are (contexts, labels). The loss reads the rows of the table that they name and
    no other, whose gradient is therefore zero.
    """

    def cosines(params, rows):
        contexts, labels = rows
        # One lookup in the table: its gradient is then summed in the order of the rows,
        # whatever the table's size, as `fedselect` needs.
        read = params.embedding[jnp.column_stack([contexts, labels])]
        context = _context(params.dense, read[:, :-1], contexts)
        return (context * _normal(read[:, -1])).sum(axis=1)

    def loss(params, rows):
        short = MARGIN - predict(cosines, params, rows)
        return jnp.square(jax.nn.relu(short))

    return loss


def spreadout(params: PyTree, strength: float = 1e-3) -> jax.Array:
    """``strength`` times the norm of all cosines between two different movies.

    Args:
        params: of a dual encoder.
        strength: lambda.

    Example:
        >>> table = jnp.array([[9.0, 9], [2, 0], [0, 1], [3, 0]])  # row 0 is PAD's
        >>> params = dual_encoder(3, width=2).init(jax.random.key(0))
        >>> params = params._replace(embedding=table)
        >>> round(float(spreadout(params, 1.0) ** 2), 4)  # a pair of 1, twice
        2.0
    """
    rows = _normal(params.embedding[PAD + 1 :])
    squares = jnp.square(rows).sum(axis=1)
    total = jnp.square(rows.T @ rows).sum() - jnp.square(squares).sum()
    # At 0 the root has no derivative, and rounding may make the total negative.
    apart = total <= 0
    return strength * jnp.where(apart, 0, jnp.sqrt(jnp.where(apart, 1, total)))


def _context(dense: Affine, read: jax.Array, contexts: jax.Array) -> jax.Array:
    """The context tower, [rows, width], of rows of the table."""
    known = (contexts != PAD)[..., None].astype(read.dtype)
    mean = (read * known).sum(axis=1) / jnp.maximum(known.sum(axis=1), 1)
    return _normal(jax.nn.relu(linear(dense, mean)))


def _normal(vectors: jax.Array) -> jax.Array:
    """Every row with norm 1; a row near zero stays shorter, so that it is finite."""
    squares = jnp.square(vectors).sum(axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))
