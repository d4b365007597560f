# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Measures against scikit-learn, and summaries over clients by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scored_rows import ONE, apply, batch_of, cases
from sklearn import metrics as sklearn_metrics

from fedblend import metrics
from fedblend.core import Batch
from fedblend.losses import cross_entropy
from fedblend.mixing import outputs


def test_auc_is_exact_with_ties_and_masks():
    for scores, labels, mask in cases(1):
        expected = sklearn_metrics.roc_auc_score(labels[mask], scores[mask, 0])
        for shaped in (scores, scores[:, 0]):
            got = metrics.auc(apply)(ONE, batch_of(shaped, labels, mask))
            np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_auc_of_two_scores_and_infinite_ones():
    for scores, labels, mask in cases(2):
        margin = scores[mask, 1] - scores[mask, 0]
        expected = sklearn_metrics.roc_auc_score(labels[mask], margin)
        got = metrics.auc(apply)(ONE, batch_of(scores, labels, mask))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    scores = jnp.array([jnp.inf, 1.0, jnp.inf, -jnp.inf])
    labels, mask = jnp.array([1, 0, 0, 0]), jnp.array([True, True, True, False])
    assert metrics.auc(apply)(ONE, Batch((scores, labels), mask)) == 0.75


def test_accuracy():
    for scores, labels, mask in cases(3):
        expected = sklearn_metrics.accuracy_score(
            labels[mask], scores[mask].argmax(axis=1)
        )
        got = metrics.accuracy(apply)(ONE, batch_of(scores, labels, mask))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    for scores, labels, mask in cases(1):
        expected = sklearn_metrics.accuracy_score(labels[mask], scores[mask, 0] > 0)
        for targets in (labels, 2 * labels - 1):
            got = metrics.accuracy(apply)(ONE, batch_of(scores, targets, mask))
            np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_recall_of_classes(k):
    for seed, (_, labels, mask) in enumerate(cases(5)):
        scores = np.random.default_rng(seed).normal(size=(50, 5))  # without ties
        expected = sklearn_metrics.top_k_accuracy_score(
            labels[mask], scores[mask], k=k, labels=np.arange(5)
        )
        got = metrics.recall_at(apply, k)(ONE, batch_of(scores, labels, mask))
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_recall_of_many_labels():
    scores = jnp.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    labels = jnp.array([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    measure = metrics.recall_at(apply, 2)
    assert measure(ONE, Batch((scores, labels))) == (1 / 2 + 0) / 2
    mask = jnp.array([True, False, True])
    assert measure(ONE, Batch((scores, labels), mask)) == 1 / 2
    with pytest.raises(ValueError, match=r"recall_at: k = 4, .* 3 outputs"):
        metrics.recall_at(apply, 4)(ONE, Batch((scores, labels)))


def test_next_token_accuracy_counts_places():
    """Over all places of all rows: a row with fewer of them counts less."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6, 5, 4)).astype(np.float32)
    targets = rng.integers(0, 4, (6, 5))
    targets[0], targets[1, 1:] = scores[0].argmax(axis=1), -1
    mask = np.array([True, True, True, False, True, False])
    known = mask[:, None] & (targets >= 0)
    wanted = (scores.argmax(axis=2) == targets)[known].mean()
    measure = metrics.next_token_accuracy(apply)
    got = measure(ONE, batch_of(scores, targets, mask))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert 0 < wanted < 1 and known.sum() == 16
    unknown = Batch((jnp.asarray(scores), jnp.full((6, 5), -1)))
    assert np.isnan(measure(ONE, unknown))


def test_mean_squared_error_and_loss():
    rng = np.random.default_rng(0)
    values, targets = rng.normal(size=(2, 9, 3)).astype(np.float32)
    mask = np.arange(9) < 6
    expected = sklearn_metrics.mean_squared_error(targets[:6], values[:6])
    got = metrics.mean_squared_error(apply)(ONE, batch_of(values, targets, mask))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    labels = rng.integers(0, 3, 9)
    chances = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
    expected = sklearn_metrics.log_loss(labels[:6], chances[:6], labels=[0, 1, 2])
    measure = metrics.mean_loss(cross_entropy(apply))
    got = measure(ONE, batch_of(values, labels, mask))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


KINDS = {
    "classes": ((3,), ()),
    "binary": ((1,), ()),
    "regression": ((1,), ()),
    "sequence": ((6, 3), (6,)),
    "tags": ((7,), (7,)),
}
"""The shapes of a row's scores and of its targets."""


@pytest.mark.parametrize("kind", KINDS)
def test_standard_measures_take_blends_and_are_nan_without_rows(kind):
    def loss(model, rows):
        del model
        return rows[0].reshape(len(rows[0]), -1)[:, 0]

    measures = metrics.standard(kind, loss, apply)
    for name, metric in measures.items():
        plain = metrics.make_metrics({name: lambda model, batch: jnp.zeros(())})[name]
        assert plain.higher_is_better == metric.higher_is_better
        assert plain.bounded == metric.bounded
        assert plain.counts_rows == metric.counts_rows
    rng = np.random.default_rng(0)
    of_scores, of_labels = KINDS[kind]
    scores = jnp.asarray(rng.normal(size=(20, *of_scores)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 2, (20, *of_labels)))
    model = outputs(0.5, ONE, jnp.float32(3))
    for measure in measures.values():
        full = measure(model, Batch((scores, labels)))
        np.testing.assert_allclose(full, measure(2 * ONE, Batch((scores, labels))))
        assert full.shape == () and full.dtype == jnp.float32 and np.isfinite(full)
        assert np.isnan(measure(ONE, Batch((scores, labels), jnp.zeros(20, bool))))


def test_measures_are_mapped_over_clients():
    scores = jnp.array([[1.0, -1.0, 2.0], [1.0, -1.0, 2.0]])
    labels = jnp.array([[1, 0, 1], [1, 1, 1]])
    mapped = jax.vmap(metrics.auc(apply), in_axes=(None, 0))
    np.testing.assert_array_equal(mapped(ONE, Batch((scores, labels))), [1, np.nan])


def test_auc_of_a_diverged_model_is_unknown():
    scores, labels = jnp.array([jnp.nan, 1.0]), jnp.array([1, 0])
    assert np.isnan(metrics.auc(apply)(ONE, Batch((scores, labels))))


def test_unknown_kind():
    with pytest.raises(ValueError, match="kind: 'class' is not 'classes', 'binary'"):
        metrics.standard("class", cross_entropy(apply), apply)


def test_spread():
    values = np.array([np.nan, *np.arange(20.0)])
    counts = np.arange(21)
    spread = metrics.client_spread(values, counts, True)
    assert spread.clients == 20 and spread.mean == 9.5
    assert spread.weighted == pytest.approx(
        sum(i * (i + 1) for i in range(20)) / sum(range(1, 21))
    )
    assert spread.std == pytest.approx(np.arange(20).std())
    assert (spread.worst, spread.worst_tenth, spread.best) == (0, 0.5, 19)
    spread = metrics.client_spread(values, counts, False)
    assert (spread.worst, spread.worst_tenth, spread.best) == (19, 18.5, 0)


def test_spread_of_few_diverged_or_no_clients():
    spread = metrics.client_spread(np.array([3.0, 1.0]), np.array([1, 1]), False)
    assert spread.worst_tenth == 3
    spread = metrics.client_spread(np.array([np.inf, 1.0]), np.array([1, 1]), False)
    assert spread.mean == np.inf and spread.best == 1
    nothing = metrics.client_spread(np.array([np.nan]), np.array([1]), True)
    assert nothing.clients == 0 and np.isnan(nothing[:-1]).all()
