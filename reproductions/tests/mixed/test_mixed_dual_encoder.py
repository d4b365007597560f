# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The dual encoder against NumPy loops, and its regularizer against all pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.core import Batch
from fedblend_reproductions.mixed.dual_encoder import (
    DualEncoder,
    dual_encoder,
    dual_encoder_loss,
    spreadout,
)

MOVIES, WIDTH = 12, 4
model = dual_encoder(MOVIES, width=WIDTH)
params = model.init(jax.random.key(1))
contexts = np.array([[3, 7, 0], [5, 0, 0], [1, 2, 3], [0, 0, 0]], np.int32)
labels = np.array([4, 12, 1, 6], np.int32)
apply, loss = jax.jit(model.apply), jax.jit(dual_encoder_loss())
spread = jax.jit(jax.value_and_grad(spreadout))


def unit(vector):
    length = np.sqrt(vector @ vector)
    return vector / length if length else vector


def towers(context):
    """The context's vector and the unit rows of the table, loops and all."""
    table, weight, bias = (
        np.asarray(leaf, np.float64)
        for leaf in (params.embedding, params.dense.weight, params.dense.bias)
    )
    seen = [table[movie] for movie in context if movie]
    mean = np.mean(seen, axis=0) if seen else np.zeros(WIDTH)
    return unit(np.maximum(weight @ mean + bias, 0)), [unit(row) for row in table]


def test_scores_and_losses_are_the_formulas():
    scores, losses = apply(params, contexts), loss(params, (contexts, labels))
    for place, context in enumerate(contexts):
        own, rows = towers(context)
        wanted = np.array([own @ row for row in rows])
        np.testing.assert_allclose(scores[place, 1:], wanted[1:], atol=1e-6)
        assert scores[place, 0] == -1
        hinge = max(0, 0.9 - wanted[labels[place]]) ** 2
        np.testing.assert_allclose(losses[place], hinge, atol=1e-6)


def test_a_large_cosine_costs_nothing():
    table = jnp.ones((3, 2), jnp.float32)
    dense = params.dense._replace(weight=jnp.eye(2), bias=jnp.zeros(2))
    rows = (jnp.array([[1, 0]]), jnp.array([2]))
    assert loss(DualEncoder(table, dense), rows) == 0
    other = table.at[2].set(jnp.array([1.0, -1]))  # at a right angle
    np.testing.assert_allclose(loss(DualEncoder(other, dense), rows), 0.81, rtol=1e-6)


def test_movielens_has_63520_parameters():
    shapes = jax.eval_shape(dual_encoder().init, jax.random.key(0))
    assert fb.trees.size(shapes) == 3953 * 16 + 16 * 16 + 16


def test_rows_that_no_example_names_have_no_gradient():
    gradient = jax.grad(lambda p: loss(p, (contexts[:3], labels[:3])).sum())(params)
    moved = np.flatnonzero(np.abs(gradient.embedding).sum(axis=1))
    assert set(moved) == {1, 2, 3, 4, 5, 7, 12}


def test_spreadout_is_the_norm_of_all_pairs():
    _, rows = towers(contexts[0])
    pairs = [
        (one @ other) ** 2
        for i, one in enumerate(rows[1:])
        for j, other in enumerate(rows[1:])
        if i != j
    ]
    found, _ = spread(params, 0.5)
    np.testing.assert_allclose(found, 0.5 * np.sqrt(sum(pairs)), rtol=1e-5)
    wider = params._replace(embedding=params.embedding.at[0].set(100.0))
    assert spread(wider, 0.5)[0] == found  # no movie, no pair


@pytest.mark.parametrize("table", [jnp.zeros((3, 2)), jnp.eye(3)[:, :2]])
def test_spreadout_of_rows_apart_is_zero_and_flat(table):
    apart = params._replace(embedding=table)
    value, gradient = spread(apart)
    assert value == 0
    assert np.isfinite(gradient.embedding).all()


def test_recall_counts_the_rank_among_all_movies():
    scores = np.asarray(apply(params, contexts))[:3]
    ranks = [
        (row > row[label]).sum() for row, label in zip(scores, labels, strict=False)
    ]
    batch = Batch((jnp.asarray(contexts), jnp.asarray(labels)), jnp.arange(4) < 3)
    for k in (1, 5, 10, 13):
        found = fb.metrics.recall_at(apply, k)(params, batch)
        np.testing.assert_allclose(found, np.mean(np.array(ranks) < k), rtol=1e-6)


def test_a_blend_mixes_cosines():
    other = model.init(jax.random.key(2))
    blend = fb.Blend(jnp.asarray(0.25), params, other)
    scores = fb.predict(apply, blend, contexts)
    cosines = np.asarray(scores)[np.arange(4), labels]
    losses = loss(blend, (contexts, labels))
    np.testing.assert_allclose(losses, np.maximum(0.9 - cosines, 0) ** 2, atol=1e-6)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="dual_encoder: movies: 0 is not a whole"):
        dual_encoder(0)
