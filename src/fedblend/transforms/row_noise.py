# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Noise for rows: a loss of which clients get noisy gradients and nothing else.

Of a batch of b rows, with the gradient g_r of row r::

    mean gradient = (1/b) (sum over different rows of clip(g_r) + z C N(0, I))
    clip(g) = g min(1, C / |g|),    0 where g is not finite

Without a row the sum moves by at most C, with another row in its place by 2 C: each
evaluation is a Gaussian mechanism with mu = 1/z for a row that is left out. Whatever an
algorithm computes from such gradients, over any number of steps and models, has the
guarantee of all evaluations together, ``theory.privacy.row_epsilon``. The value of the
loss is NaN, and it has no second derivatives: an algorithm that uses the rows in
another way does not get an answer. One that needs the Hessian gets it with the gradient
from ``expand``, clipped as one vector of the numbers of both::

    A = (1/b) (sum over rows of clip(g_r, H_r) + z C N(0, I)),  A_H the second part
    Hessian = the nearest positive semidefinite matrix to (A_H + A_H') / 2

That is one evaluation, too: what comes after the noise costs nothing.

The noise is the operating system's, see ``transforms.noise``. A row that a batch has
twice counts once.

Reference: Abadi et al., "Deep learning with differential privacy", CCS 2016. Where this
differs from the paper: batches have a fixed size, and no secrecy of the batches is
assumed: what counts is how often a row was in one. For Hessians Dwork, Talwar,
Thakurta, Zhang, "Analyze Gauss", STOC 2014.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Lock

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.batch_statistics import refuse_statistics
from fedblend.checks import (
    NotNegative,
    Positive,
    gate,
)
from fedblend.core import Batch, Key, Loss, PyTree
from fedblend.losses import HiddenLoss, row_losses
from fedblend.transforms.noise import add_secret_noise
from fedblend.transforms.row_gradients import (
    RowGradient,
    row_gradient,
    sum_squares,
    sum_weighted,
)

Derive = Callable[[PyTree, Key | None], RowGradient]
"""What is derived from a row and its key."""
SIDES = "left", "right"
MOST_NUMBERS = 2**24
"""Of the gradients of single rows that are in memory at once."""


@dataclasses.dataclass(eq=False)
class RowNoise(HiddenLoss):
    """A loss with noisy gradients; see the module."""

    loss: Loss
    clip: float
    noise: float
    counts: bool = False
    spent: Counter[float] = dataclasses.field(default_factory=Counter)
    """Evaluations so far, by the chance that a given row was in the batch."""
    _lock: Lock = dataclasses.field(default_factory=Lock)

    def objective(self, params: PyTree, batch: Batch) -> jax.Array:
        """NaN, with a noisy gradient in the parameters."""
        refuse_statistics("loss: noise on gradients of rows", params)

        @jax.custom_vjp
        def hide(params, batch):
            del batch
            return jnp.full((), jnp.nan, jnp.result_type(*jax.tree.leaves(params)))

        def forward(params, batch):
            return hide(params, batch), (params, batch)

        def backward(kept, slope):
            params, batch = kept
            derive = partial(row_gradient, self.loss, params)
            found = self._noisy_mean(derive, params, batch)
            scaled = jax.tree.map(lambda leaf: slope.astype(leaf.dtype) * leaf, found)
            return scaled, None

        hide.defvjp(forward, backward)
        return hide(params, batch)

    def expand(self, params: PyTree, batch: Batch) -> Callable[[jax.Array], jax.Array]:
        """A noisy quadratic, convex, with the noisy gradient and Hessian here."""
        point, layout = trees.ravel(params)

        def derive(row, key):
            only = Batch(jax.tree.map(lambda leaf: leaf[None], row), key=key)

            def value(vector):
                return row_losses(self.loss, trees.unravel(vector, layout), only)[0]

            return RowGradient(
                {0: jax.grad(value)(point), 1: jax.hessian(value)(point)}, {}
            )

        like = point, jnp.zeros((len(point),) * 2, point.dtype)
        slope, curve = self._noisy_mean(derive, like, batch)
        wide = jnp.promote_types(point.dtype, jnp.float32)
        values, axes = jnp.linalg.eigh(curve.astype(wide), symmetrize_input=True)
        curve = (axes @ jnp.diag(jnp.maximum(values, 0)) @ axes.T).astype(point.dtype)

        def quadratic(vector):
            move = vector - point
            return jnp.vdot(slope + curve @ move / 2, move)

        return quadratic

    def take_spent(self) -> dict[float, int]:
        """The evaluations since the last call, which are forgotten here."""
        assert self.counts
        with self._lock:
            found = dict(self.spent)
            self.spent.clear()
        return found

    def _noisy_mean(
        self,
        derive: Derive,
        like: PyTree,
        batch: Batch,
    ) -> PyTree:
        """Of what is derived from each row, a tree as ``like``."""
        size = len(jax.tree.leaves(batch.rows)[0])
        weights, count, share = jnp.ones(size), jnp.asarray(float(size)), jnp.ones(())
        if batch.mask is not None:
            weights = batch.mask.astype(weights.dtype)
            count = jnp.maximum(weights.sum(), 1)
        if batch.drawn is not None:
            index = batch.drawn.index
            ordered = jnp.sort(index)
            left, right = (jnp.searchsorted(ordered, index, s) for s in SIDES)
            weights = 1 / (right - left).astype(float)  # a row may be there twice
            share = 1 - (1 - 1 / batch.drawn.among) ** size
        total = self._sum_clipped(derive, like, batch, weights)
        if self.noise:
            told = (share, self._count) if self.counts else None
            total = add_secret_noise(total, self.noise * self.clip, told)
        return jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), total)

    def _sum_clipped(
        self,
        derive: Derive,
        like: PyTree,
        batch: Batch,
        weights: jax.Array,
    ) -> PyTree:
        """The sum of clipped gradients, some rows at a time; each has its own key."""
        size = len(weights)
        some = min(size, max(1, MOST_NUMBERS // max(trees.size(like), 1)))
        blocks = -(-size // some)

        def make_blocks(leaf):
            room = [(0, blocks * some - size), *[(0, 0)] * (leaf.ndim - 1)]
            return jnp.pad(leaf, room).reshape(blocks, some, *leaf.shape[1:])

        def own(row, place):
            key = None if batch.key is None else jax.random.fold_in(batch.key, place)
            return derive(row, key)

        def add(total, block):
            each = jax.vmap(own)(block[0], block[2])
            norms = jnp.sqrt(jax.vmap(sum_squares)(each))
            factors = jnp.minimum(1, self.clip / jnp.maximum(norms, self.clip))
            factors = jnp.where(jnp.isfinite(norms), factors * block[1], 0)
            return trees.add(total, sum_weighted(each, factors, like)), None

        rows = batch.rows, weights, jnp.arange(size)
        blocks_of_all = jax.tree.map(make_blocks, rows)
        return jax.lax.scan(add, trees.zeros_like(like), blocks_of_all)[0]

    def _count(self, shares: np.ndarray) -> None:
        with self._lock:
            self.spent.update(map(float, shares.ravel()))


@gate()
def row_noise(
    loss: Loss, clip: Positive, noise: NotNegative, counts: bool = False
) -> RowNoise:
    """The loss with gradients that hide single rows.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        clip: the largest norm of the gradient of a row; longer ones are shortened.
        noise: standard deviation of the noise on the sum over a batch, in clips.
        counts: whether evaluations are counted, for ``take_spent``, which takes time.
    """
    return RowNoise(loss, clip, noise, counts)
