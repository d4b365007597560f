# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's scorers see every row predicted by the model of its client."""

from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn import metrics
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import (
    GridSearchCV,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedblend as fb

pytestmark = pytest.mark.usefixtures("compiled", "routing")

WORK: Any = {"steps": 4, "batch_size": None}
FOLD = (np.arange(40), np.arange(40, 80))
"""One is enough: the first half to train on, the second to score."""
RAISE: Any = "raise"
CLASSIFYING = {
    "roc_auc": lambda y, p, c: metrics.roc_auc_score(y, p[:, 1]),
    "neg_log_loss": lambda y, p, c: -metrics.log_loss(y, p),
    "average_precision": lambda y, p, c: metrics.average_precision_score(y, p[:, 1]),
    "accuracy": lambda y, p, c: metrics.accuracy_score(y, c),
}
REGRESSING = {
    "r2": metrics.r2_score,
    "neg_mean_absolute_error": lambda y, p: -metrics.mean_absolute_error(y, p),
}


def apfl(loss):
    return fb.apfl(loss, fb.Work(0.5, **WORK), alpha=0.25, learn="fixed")


ALGORITHMS = {"local_only": "local_only", "finetune": "finetune", "apfl": apfl}


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


@pytest.fixture(scope="module")
def opposites():
    """Two clients that call the same inputs by opposite names: no model fits both."""
    inputs = np.random.default_rng(0).normal(size=(80, 3))
    ids = np.repeat(["here", "there"], 40)[np.random.default_rng(1).permutation(80)]
    scores = inputs @ [1.0, 2.0, -1.0] * np.where(ids == "here", 1, -1)
    return inputs, scores, ids


def classifier(name: str) -> Any:
    given = {"algorithm": ALGORITHMS.get(name, name), "rounds": 5, "rate": 0.5}
    return fb.FederatedClassifier(**given, **WORK)


def regressor(name: str, **given) -> Any:
    given = {"rounds": 5, "rate": 0.1, **given}
    return fb.FederatedRegressor(algorithm=ALGORITHMS.get(name, name), **given, **WORK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_scorer_scores_the_personal_models(name, opposites):
    inputs, scores, ids = opposites
    labels = scores > 0
    found = cross_validate(
        classifier(name),
        inputs,
        labels,
        cv=[FOLD],
        params={"client_ids": ids},
        scoring={of: fb.client_scorer(of) for of in CLASSIFYING},
        return_estimator=True,
        error_score=RAISE,
    )
    (own,), (_, test) = found["estimator"], FOLD
    chances = own.predict_proba(inputs[test], client_ids=ids[test])
    classes = own.predict(inputs[test], client_ids=ids[test])
    for of, by_hand in CLASSIFYING.items():
        wanted = by_hand(labels[test], chances, classes)
        assert found[f"test_{of}"] == pytest.approx([wanted], rel=1e-12), of
    assert found["test_roc_auc"].min() > 0.9  # the shared model has about 0.5


def test_validation_that_hands_on_no_ids_is_refused(opposites):
    inputs, scores, ids = opposites
    with pytest.raises(ValueError, match="client_ids: missing") as error:
        cross_val_score(
            classifier("local_only"),
            inputs,
            scores > 0,
            cv=[FOLD],
            params={"client_ids": ids},
            scoring="roc_auc",
            error_score=RAISE,
        )
    assert "fb.client_scorer" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def alone(opposites, compiled):
    """A model for each of the two, and the same as a regression."""
    inputs, scores, ids = (part[FOLD[0]] for part in opposites)
    classes = classifier("local_only").fit(inputs, scores > 0, client_ids=ids)
    return classes, regressor("local_only").fit(inputs, scores, client_ids=ids)


@pytest.mark.parametrize("scoring", [*CLASSIFYING, *REGRESSING])
def test_a_scorer_that_hands_on_no_ids_is_refused(scoring, opposites, alone):
    inputs, scores, _ = opposites
    number = int(scoring in REGRESSING)
    targets = scores if number else scores > 0
    with pytest.raises(ValueError, match="client_ids: missing"):
        metrics.get_scorer(scoring)(alone[number], inputs, targets)


def test_a_search_in_a_pipeline(opposites):
    inputs, targets, ids = opposites
    scorer = fb.client_scorer("r2")
    search = GridSearchCV(
        make_pipeline(StandardScaler(), regressor("local_only")),
        {"federatedregressor__rate": [1e-6, 0.1]},
        scoring=scorer,
        cv=[FOLD],
        error_score=RAISE,
    )
    search.fit(inputs, targets, client_ids=ids)
    assert search.best_params_ == {"federatedregressor__rate": 0.1}
    best: Any = search.best_estimator_
    wanted = metrics.r2_score(targets, best.predict(inputs, client_ids=ids))
    assert wanted > 0.8
    # As an outer loop of cross-validation would do it.
    assert scorer(search, inputs, targets, client_ids=ids) == wanted
    assert search.score(inputs, targets, client_ids=ids) == wanted


def test_ids_are_asked_for_only_where_models_differ(opposites, alone):
    inputs, targets, ids = opposites
    _, own = alone
    for without in (own.predict, lambda rows: own.score(rows, targets)):
        with pytest.raises(ValueError, match="client_ids: missing"):
            without(inputs)
    assert len(own.predict(inputs, client_id="here")) == len(inputs)
    shared = regressor("fedavg", rounds=1).fit(inputs, targets, client_ids=ids)
    np.testing.assert_array_equal(
        shared.predict(inputs), shared.predict(inputs, client_ids=ids)
    )
    # All rows are one client's where nobody says otherwise, in fitting and after it.
    single = regressor("local_only", rounds=1).fit(inputs, targets)
    np.testing.assert_array_equal(
        single.predict(inputs), single.predict(inputs, client_id=0)
    )
    assert np.abs(single.predict(inputs)).max() > 0


def test_a_fit_that_diverges_warns(opposites):
    inputs, targets, ids = opposites
    with pytest.warns(ConvergenceWarning, match="answers of clients were not finite"):
        regressor("fedavg", rounds=1, rate=1e30).fit(inputs, targets, client_ids=ids)


@pytest.mark.parametrize("name", [*REGRESSING, "one's own"])
def test_scorers_of_regressions_score_the_personal_models(name, opposites, alone):
    inputs, targets, ids = opposites
    by_hand = REGRESSING.get(name, metrics.max_error)
    scoring = name if name in REGRESSING else metrics.make_scorer(by_hand)
    wanted = by_hand(targets, alone[1].predict(inputs, client_ids=ids))
    scorer = fb.client_scorer(scoring)
    assert scorer(alone[1], inputs, targets, client_ids=ids) == wanted
