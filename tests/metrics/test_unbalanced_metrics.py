# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics for unbalanced classes and for probabilities, against scikit-learn."""

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scored_rows import ONE, apply, batch_of, cases, value_and_rows
from sklearn import metrics as sklearn_metrics
from sklearn.calibration import calibration_curve

from fedblend import metrics
from fedblend.core import Batch


def softmax(scores):
    scores = scores.astype(np.float64)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def sigmoid(scores):
    return 1 / (1 + np.exp(-scores.astype(np.float64)))


def of_two(name):
    return {
        "auc": sklearn_metrics.roc_auc_score,
        "average_precision": sklearn_metrics.average_precision_score,
        "log_loss": sklearn_metrics.log_loss,
        "brier": sklearn_metrics.brier_score_loss,
        "balanced_accuracy": lambda y, p: sklearn_metrics.balanced_accuracy_score(
            y, p > 0.5
        ),
        "calibration_error": binned_error,
        "calibration_gap": lambda y, p: abs(p.mean() - y.mean()),
    }[name]


def binned_error(labels, chances):
    """By scikit-learn's curve, and how many rows are in each of its bins."""
    true, stated = calibration_curve(labels, chances, n_bins=10)
    places = np.searchsorted(np.linspace(0, 1, 11)[1:-1], chances)
    rows = np.bincount(places, minlength=10)
    return np.abs(true - stated) @ rows[rows > 0] / len(labels)


NAMES = [
    *("auc", "average_precision", "log_loss", "brier", "balanced_accuracy"),
    *("calibration_error", "calibration_gap"),
]


@cache
def built(name, kind="binary"):
    return metrics.build(name, kind, lambda params, rows: rows[0], apply)


@pytest.mark.parametrize("name", NAMES)
def test_two_classes_equal_scikit_learn_with_ties_and_masks(name):
    for scores, labels, mask in cases(1):
        expected = of_two(name)(labels[mask], sigmoid(scores[mask, 0]))
        both = np.concatenate([-scores / 2, scores / 2], axis=1)
        for shaped in (scores, scores[:, 0], both):
            if name == "balanced_accuracy" and shaped is both:
                continue  # scores that tie: the class is the first of two, as argmax
            value, rows = value_and_rows(built(name), shaped, labels, mask)
            np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-6)
            if rows is not None:
                np.testing.assert_allclose(rows.mean(), value, rtol=1e-4, atol=1e-6)


def of_many(name):
    def accuracy_of(y, p):
        return sklearn_metrics.balanced_accuracy_score(y, p.argmax(axis=1))

    def error_of(y, p):
        return binned_error(p.argmax(axis=1) == y, p.max(axis=1))

    return {
        "auc": lambda y, p: sklearn_metrics.roc_auc_score(y, p, multi_class="ovr"),
        "average_precision": sklearn_metrics.average_precision_score,
        "log_loss": sklearn_metrics.log_loss,
        "brier": lambda y, p: sklearn_metrics.brier_score_loss(y, p) / 2,
        "balanced_accuracy": accuracy_of,
        "calibration_error": error_of,
        "calibration_gap": lambda y, p: abs(
            p.max(axis=1).mean() - (p.argmax(axis=1) == y).mean()
        ),
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_more_classes_equal_scikit_learn(name):
    for seed, (_, labels, mask) in enumerate(cases(4)):
        scores = np.random.default_rng(seed).normal(size=(50, 4)).astype(np.float32)
        scores[::7] = scores[0]  # rows that tie
        expected = of_many(name)(labels[mask], softmax(scores[mask]))
        value, rows = value_and_rows(built(name, "classes"), scores, labels, mask)
        np.testing.assert_allclose(value, expected, rtol=2e-5)
        if rows is not None:
            np.testing.assert_allclose(rows.mean(), value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["auc", "average_precision"])
def test_classes_that_a_client_has_not_do_not_count(name):
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(40, 5)), rng.choice([0, 3], 40)
    chances = softmax(scores)
    expected = np.mean(
        [of_two(name)(labels == label, chances[:, label]) for label in (0, 3)]
    )
    got = built(name, "classes")(ONE, Batch((jnp.asarray(scores), jnp.asarray(labels))))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_confident_scores_are_still_told_apart():
    """The probabilities of the first class are all 1 in single precision."""
    scores = np.array([[50.0, 0, 0], [60, 0, 0], [70, 0, 0], [80, 0, 0], [0, 9, 0]])
    labels = np.array([1, 2, 0, 0, 1])
    got = built("auc", "classes")(ONE, batch_of(scores, labels, np.ones(5, bool)))
    of_first = 1.0
    second = sklearn_metrics.roc_auc_score(labels == 1, -scores[:, 0] + scores[:, 1])
    third = sklearn_metrics.roc_auc_score(labels == 2, [-50, -60, -70, -80, -9])
    np.testing.assert_allclose(got, np.mean([of_first, second, third]), rtol=1e-6)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_only(label):
    scores = np.random.default_rng(0).normal(size=(9, 1)).astype(np.float32)
    labels, mask = np.full(9, label), np.ones(9, bool)
    value, rows = value_and_rows(built("auc"), scores, labels, mask)
    assert np.isnan(value) and np.isnan(rows).all()
    value, rows = value_and_rows(built("average_precision"), scores, labels, mask)
    assert (value == 1 and abs(rows - 1).max() < 1e-6) if label else np.isnan(value)
    value, _ = value_and_rows(built("balanced_accuracy"), scores, labels, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn, about the absent class
        wanted = sklearn_metrics.balanced_accuracy_score(labels, scores[:, 0] > 0)
    np.testing.assert_allclose(value, wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [1, 3])
def test_a_diverged_model_has_no_number(name, classes):
    scores = np.random.default_rng(0).normal(size=(9, classes)).astype(np.float32)
    scores[4, 0] = np.nan
    labels = np.arange(9) % max(classes, 2)
    metric = built(name, "classes" if classes > 1 else "binary")
    for mask in (np.ones(9, bool), np.zeros(9, bool)):
        assert np.isnan(value_and_rows(metric, scores, labels, mask)[0])


@pytest.mark.parametrize("name", ["average_precision", "balanced_accuracy", "auc"])
@pytest.mark.parametrize("classes", [1, 3])
def test_what_rows_bring_has_the_error_of_the_jackknife(name, classes):
    """Pseudo-values are those of leaving one row out, to the order of 1/rows."""
    rng = np.random.default_rng(3)
    labels = rng.choice(max(classes, 2), 400, p=[0.8, 0.2] if classes < 3 else None)
    scores = rng.normal(size=(400, classes)).astype(np.float32)
    scores[np.arange(400), labels % classes] += labels * 0.7 + 0.3
    kind = "binary" if classes == 1 else "classes"
    metric = built(name, kind)
    value, rows = value_and_rows(metric, scores, labels, np.ones(400, bool))
    masks = ~jnp.eye(400, dtype=bool)
    batch = Batch((jnp.asarray(scores), jnp.asarray(labels)))
    left = jax.jit(jax.vmap(lambda mask: metric(ONE, Batch(batch.rows, mask))))(masks)
    pseudo = 400 * value - 399 * np.asarray(left)
    assert np.corrcoef(rows, pseudo)[0, 1] > 0.995
    np.testing.assert_allclose(rows.std(), pseudo.std(), rtol=0.05)


def test_a_perfect_model_is_calibrated_and_a_bold_one_is_not():
    rng = np.random.default_rng(0)
    odds = rng.normal(size=20_000).astype(np.float32)
    labels = (rng.random(20_000) < sigmoid(odds)).astype(int)
    batch = Batch((jnp.asarray(odds), jnp.asarray(labels)))
    error, gap = (
        jax.jit(built(name)) for name in ("calibration_error", "calibration_gap")
    )
    assert error(ONE, batch) < 0.015 and gap(ONE, batch) < 0.01
    assert error(3 * ONE, batch) > 0.1 and gap(3 * ONE, batch) < 0.01


def test_labels_may_be_minus_one_and_one():
    for scores, labels, mask in cases(1):
        for name in NAMES:
            one, other = (
                value_and_rows(built(name), scores, targets, mask)[0]
                for targets in (labels, 2 * labels - 1)
            )
            assert one == other
