# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Ensembles of models: what is averaged, and how they start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb

KEY = jax.random.key(0)
WEIGHTS = np.array([0.2, 0.5, 0.3])
SCORES = np.random.default_rng(0).normal(size=(3, 4, 5))
"""Of three models, four rows and five classes."""


def averaged(scores, outputs, shift=0.0):
    """What an ensemble makes of these scores, with log weights moved by a constant."""
    model = fb.models.Model(lambda key: jnp.zeros(()), lambda params, rows: params)
    params = fb.models.Ensemble(jnp.log(WEIGHTS) + shift, jnp.asarray(scores))
    return fb.models.ensemble(model, 3, outputs=outputs).apply(params, None)


def test_probabilities_of_classes_are_averaged():
    chances = np.exp(SCORES) / np.exp(SCORES).sum(axis=2, keepdims=True)
    wanted = np.tensordot(WEIGHTS, chances, axes=1)
    found = averaged(SCORES, "classes", shift=7.0)
    np.testing.assert_allclose(jnp.exp(found), wanted, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1)])
def test_a_single_score_stays_the_log_odds_of_class_1(shape):
    scores = SCORES[..., 0].reshape(shape)
    wanted = np.tensordot(WEIGHTS, 1 / (1 + np.exp(-scores)), axes=1)
    found = averaged(scores, "classes")
    assert found.shape == shape[1:]
    np.testing.assert_allclose(jax.nn.sigmoid(found), wanted, rtol=1e-5)


def test_labels_are_averaged_one_by_one_and_values_as_they_are():
    wanted = np.tensordot(WEIGHTS, 1 / (1 + np.exp(-SCORES)), axes=1)
    found = jax.nn.sigmoid(averaged(SCORES, "tags"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    found = averaged(SCORES, "values")
    np.testing.assert_allclose(found, np.tensordot(WEIGHTS, SCORES, axes=1), rtol=1e-4)


@pytest.mark.slow
def test_models_start_apart_and_the_first_where_one_model_does():
    linear, network = fb.models.softmax(4, 3), fb.models.mlp(4, 3, hidden=(5,))
    models = fb.models.ensemble(linear, 3).init(KEY).models
    assert not models.weight[0].any()
    assert 0.02 < models.weight[1:].std() < 0.1
    assert (models.weight[1] != models.weight[2]).all()
    still = fb.models.ensemble(linear, 3, spread=0.0).init(KEY)
    assert not still.models.weight.any()
    models = fb.models.ensemble(network, 2).init(KEY).models
    np.testing.assert_array_equal(models.last.weight[0], network.init(KEY).last.weight)
    size = np.sqrt(6 / (5 + 3))  # Glorot's uniform weights have no noise on them
    assert (np.abs(models.last.weight) <= size).all()
    assert (models.last.weight[0] != models.last.weight[1]).all()


def test_wrong_arguments_are_one_line():
    with pytest.raises(ValueError, match=r"^ensemble: number: 0 is not a whole number"):
        fb.models.ensemble(fb.models.softmax(4, 3), 0)
    with pytest.raises(ValueError, match=r"^ensemble: outputs: 'x' is not 'classes', "):
        fb.models.ensemble(fb.models.softmax(4, 3), 2, outputs="x")
