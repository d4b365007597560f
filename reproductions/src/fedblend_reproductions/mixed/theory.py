# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How much the two losses of Mixed FL disagree.

With weighted gradients ``g_f = w_f grad f_f`` and ``g_c = w_c grad f_c`` at a point::

    G^2 = |g_f|^2 / w_f + |g_c|^2 / w_c - |g_f + g_c|^2
    B^2 = (|g_f|^2 / w_f + |g_c|^2 / w_c) / |g_f + g_c|^2

G is 0 and B is 1 where both gradients are the same; where G or B is large, parallel
training converges slowly. Near a minimum of the mixture B^2 has a denominator of almost
0, whatever the losses are: look at it where the gradient is large.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655, section
5 and appendix C.
"""

from typing import NamedTuple

import jax

from fedblend import trees
from fedblend.core import PyTree


class Disagreement(NamedTuple):
    """G^2 and B^2 at a point, and |g_f + g_c|^2 there."""

    gap: jax.Array
    ratio: jax.Array
    mixed: jax.Array


def disagreement(
    federated: PyTree, central: PyTree, weights: tuple[float, float]
) -> Disagreement:
    """G^2 and B^2, and the squared norm of the mixture's gradient.

    Args:
        federated: the gradient of f_f, without its weight.
        central: the gradient of f_c, without its weight.
        weights: w_f and w_c.

    >>> import jax.numpy as jnp
    >>> one = jnp.array([1.0, 0.0])
    >>> [float(value) for value in disagreement(one, one, (0.5, 0.5))]
    [0.0, 1.0, 1.0]
    >>> [float(value) for value in disagreement(one, one[::-1], (0.5, 0.5))]
    [0.5, 2.0, 0.5]
    """
    w_f, w_c = weights
    both = w_f * trees.sum_squares(federated) + w_c * trees.sum_squares(central)
    mixed = trees.add(trees.scale(w_f, federated), trees.scale(w_c, central))
    of_mixture = trees.sum_squares(mixed)
    return Disagreement(both - of_mixture, both / of_mixture, of_mixture)
