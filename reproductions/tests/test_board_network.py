# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The board's network: every way to compute it is the plain convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend import trees
from fedblend_reproductions.board.network import network


def plain(params, images):
    """The network in words of NumPy: loops over pixels of the output."""

    def layer(images, weight, bias):
        size, rows = weight.shape[0], images.shape[1] - weight.shape[0] + 1
        out = np.zeros((len(images), rows, rows, weight.shape[3]))
        for i in range(rows):
            for j in range(rows):
                patch = images[:, i : i + size, j : j + size]
                out[:, i, j] = np.einsum("nhwc,hwco->no", patch, weight) + bias
        out = np.maximum(out, 0)
        pairs = (out[:, a::2, b::2] for a in range(2) for b in range(2))
        return np.maximum.reduce(list(pairs))

    first, second, hidden, _, last = jax.tree.map(np.float64, params)
    here = layer(images.reshape(-1, 28, 28, 1), *first)
    here = layer(here, *second).reshape(len(images), -1)
    here = np.maximum(here @ hidden.weight.T + hidden.bias, 0)
    return here @ last.weight.T + last.bias


@pytest.mark.slow
def test_the_network_is_pfllibs():
    images = np.random.default_rng(0).random((2, 28, 28), np.float32)
    model = network("float32")
    params = model.init(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 582_026
    scores = model.apply(params, jnp.asarray(images))
    np.testing.assert_allclose(scores, plain(params, images), atol=1e-5)


@pytest.mark.slow
def test_low_precision_is_near():
    images = np.random.default_rng(1).random((2, 28, 28), np.float32)
    params = network().init(jax.random.key(1))

    def gradient(precision):
        model = network(precision)
        return jax.grad(lambda p: (model.apply(p, images) ** 2).sum())(params)

    exact = gradient("float32")
    gap = trees.subtract(gradient("bfloat16"), exact)
    ratio = trees.sum_squares(gap) / trees.sum_squares(exact)
    assert 0 < ratio**0.5 < 0.1
