# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Losses against scikit-learn and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import log_loss

from fedblend import losses
from fedblend.core import Batch
from fedblend.mixing import outputs, predict
from fedblend.models import logistic, mlp, softmax

RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.normal(size=(12, 4)), jnp.float32)
MASK = jnp.asarray(RNG.random(12) < 0.6)


def params_like(model):
    tree = model.init(jax.random.key(0))
    return jax.tree.map(
        lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape), leaf.dtype), tree
    )


@pytest.mark.parametrize("mask", [None, MASK])
def test_cross_entropy_is_log_loss(mask):
    model = softmax(4, 3)
    params, labels = params_like(model), RNG.integers(0, 3, 12)
    chances = jax.nn.softmax(model.apply(params, INPUTS))
    expected = log_loss(labels, chances, labels=[0, 1, 2], sample_weight=mask)
    loss = losses.cross_entropy(model.apply)
    got = losses.objective(loss, params, Batch((INPUTS, jnp.asarray(labels)), mask))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, MASK])
def test_logistic_is_log_loss_for_either_coding(mask):
    model = logistic(4)
    params, labels = params_like(model), RNG.integers(0, 2, 12)
    chances = jax.nn.sigmoid(model.apply(params, INPUTS))
    expected = log_loss(labels, chances, sample_weight=mask)
    loss = losses.logistic(model.apply)
    for targets in (labels, 2 * labels - 1):
        batch = Batch((INPUTS, jnp.asarray(targets)), mask)
        got = losses.objective(loss, params, batch)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_logistic_does_not_overflow():
    loss = losses.logistic(lambda params, inputs: params * inputs)
    rows = (jnp.array([1e4, -1e4]), jnp.array([0, 0]))
    np.testing.assert_allclose(loss(jnp.float32(1), rows), [1e4, 0])
    gradient = jax.grad(lambda p: loss(p, rows).sum())(jnp.float32(1))
    np.testing.assert_allclose(gradient, 1e4)


def test_squared_error_by_hand():
    model = mlp(4, 2, hidden=())
    params = params_like(model)
    targets = RNG.normal(size=(12, 2)).astype(np.float32)
    got = losses.squared_error(model.apply)(params, (INPUTS, jnp.asarray(targets)))
    gaps = np.asarray(model.apply(params, INPUTS)) - targets
    np.testing.assert_allclose(got, 0.5 * (gaps**2).sum(axis=1), rtol=1e-5)
    single = losses.squared_error(lambda params, inputs: inputs[:, :1])
    rows = (INPUTS, jnp.zeros(12))
    np.testing.assert_allclose(single((), rows), INPUTS[:, 0] ** 2 / 2, rtol=1e-6)


def test_l2_by_hand():
    model = softmax(4, 3)
    params = params_like(model)
    rows = (INPUTS, jnp.asarray(RNG.integers(0, 3, 12)))
    plain = losses.cross_entropy(model.apply)
    square = sum(float((np.asarray(leaf) ** 2).sum()) for leaf in params)
    got = losses.l2(plain, 0.1)(params, rows)
    np.testing.assert_allclose(got, plain(params, rows) + 0.05 * square, rtol=1e-5)


def test_gradient_is_that_of_the_masked_mean():
    model = softmax(4, 3)
    params, labels = params_like(model), jnp.asarray(RNG.integers(0, 3, 12))
    gradient = jax.jit(losses.gradient(losses.cross_entropy(model.apply)))
    masked = gradient(params, Batch((INPUTS, labels), MASK))
    alone = gradient(params, Batch((INPUTS[MASK], labels[MASK])))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), masked, alone
    )


def test_rows_that_do_not_count_may_hold_anything():
    def loss(params, rows):
        return params * rows

    rows = jnp.array([1.0, jnp.inf, 3.0, jnp.nan])
    batch = Batch(rows, jnp.array([True, False, True, False]))
    assert losses.objective(loss, jnp.float32(2), batch) == 4
    nothing = Batch(rows, jnp.zeros(4, bool))
    assert losses.objective(loss, jnp.float32(2), nothing) == 0


def test_losses_take_a_blend():
    model = softmax(4, 3)
    blend = outputs(0.3, params_like(model), params_like(model))
    labels = jnp.asarray(RNG.integers(0, 3, 12))
    scores = predict(model.apply, blend, INPUTS)
    got = losses.cross_entropy(model.apply)(blend, (INPUTS, labels))
    expected = log_loss(labels, jax.nn.softmax(scores), labels=[0, 1, 2])
    np.testing.assert_allclose(got.mean(), expected, rtol=1e-5)


def test_l2_of_a_blend_is_the_mixture_of_both_penalties():
    blend = outputs(0.25, jnp.array([2.0]), jnp.array([4.0]))
    nothing = losses.l2(lambda params, rows: jnp.zeros(1), strength=1.0)
    # 0.25 * 2^2 / 2 + 0.75 * 4^2 / 2
    np.testing.assert_allclose(nothing(blend, None), [6.5])


def test_sequence_cross_entropy_counts_known_places_only():
    scores = RNG.normal(size=(4, 6, 5)).astype(np.float32)
    targets = RNG.integers(0, 5, (4, 6))
    targets[1, 4:], targets[2, 0], targets[3] = -1, -7, -1
    loss = losses.sequence_cross_entropy(lambda params, inputs: params * inputs)
    rows = (jnp.asarray(scores), jnp.asarray(targets))
    wanted = np.zeros(4)
    for row in range(3):
        known = targets[row] >= 0
        chances = jax.nn.softmax(scores[row][known])
        wanted[row] = log_loss(targets[row][known], chances, labels=range(5))
    np.testing.assert_allclose(loss(jnp.float32(1), rows), wanted, rtol=1e-5)
    slope = jax.grad(lambda p: loss(p, rows)[3])(jnp.float32(1))
    assert slope == 0


def test_multilabel_is_the_mean_log_loss_of_the_labels():
    scores = RNG.normal(size=(5, 3)).astype(np.float32)
    targets = RNG.integers(0, 2, (5, 3))
    loss = losses.multilabel(lambda params, inputs: params * inputs)
    got = loss(jnp.float32(1), (jnp.asarray(scores), jnp.asarray(targets)))
    chances = 1 / (1 + np.exp(-scores))
    wanted = [
        log_loss(y, p, labels=[0, 1]) for y, p in zip(targets, chances, strict=True)
    ]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert got.dtype == jnp.float32
