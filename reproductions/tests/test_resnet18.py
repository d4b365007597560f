# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 with group normalization: its size, and what a group has."""

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.models.feedforward import norms
from fedblend_reproductions.resnet18 import group_normalize, resnet18


def test_resnet18_has_as_many_parameters_as_its_docstring_says():
    model = resnet18((32, 32, 3), 10)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 11_173_962
    images = jnp.zeros((2, 32, 32, 3))
    assert jax.eval_shape(model.apply, params, images).shape == (2, 10)
    assert model.features is not None
    assert jax.eval_shape(model.features, params, images).shape == (2, 512)


def test_groups_of_channels_are_normalized_in_every_row():
    rows = np.random.default_rng(0).normal(3, 2, size=(2, 5, 5, 6)).astype(np.float32)
    found = group_normalize(2, norms([6], jnp.float32)[0], jnp.asarray(rows))
    groups = np.asarray(found).reshape(2, 25, 2, 3)
    # Float32 sums of 75 entries of order 1; the deviation has 1e-5 added to its square.
    np.testing.assert_allclose(groups.mean(axis=(1, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(groups.std(axis=(1, 3)), 1, atol=1e-4)
