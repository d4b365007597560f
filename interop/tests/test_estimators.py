# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import io
from typing import Any

import jax
import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

import fedblend as fb
from fedblend_interop.estimators import FederatedClassifier, FederatedRegressor

pytestmark = pytest.mark.usefixtures("compiled")

QUICK: Any = {"rounds": 30, "steps": 5, "rate": 0.5, "batch_size": 20}


@pytest.fixture(scope="module")
def digits():
    """Five clients with two digits each; string labels and string ids."""
    inputs, labels = load_digits(return_X_y=True)
    names = np.array([f"digit {label}" for label in labels])
    ids = np.array([f"client {label // 2}" for label in labels])
    return inputs / 16, names, ids


@pytest.fixture(scope="module")
def tuned(digits, compiled):
    """A fine-tuned classifier, trained on the first 1200 rows."""
    inputs, names, ids = digits
    classifier = FederatedClassifier(algorithm="finetune", **QUICK)
    return classifier.fit(inputs[:1200], names[:1200], client_ids=ids[:1200])


def test_one_client_comes_close_to_logistic_regression(digits):
    inputs, names, _ = digits
    ours = FederatedClassifier(rounds=60, steps=10, rate=1.0, batch_size=50)
    ours.fit(inputs[:1200], names[:1200])
    theirs = LogisticRegression(max_iter=1000).fit(inputs[:1200], names[:1200])
    rest = inputs[1200:], names[1200:]
    assert abs(ours.score(*rest) - theirs.score(*rest)) < 0.02
    assert set(ours.predict(rest[0])) <= set(ours.classes_)


def test_known_clients_get_their_personal_model(digits, tuned):
    inputs, names, ids = (part[1200:] for part in digits)
    scores = inputs @ tuned.shared_.weight.T + tuned.shared_.bias
    shared = np.mean(tuned.classes_[scores.argmax(axis=1)] == names)
    personal = tuned.score(inputs, names, client_ids=ids)
    assert personal > shared
    assert tuned.score(inputs, names, client_ids=np.full(len(ids), "x")) == shared
    mine = ids == "client 1"
    one = tuned.predict(inputs[mine], client_id="client 1")
    np.testing.assert_array_equal(one, tuned.predict(inputs, client_ids=ids)[mine])
    chances = tuned.predict_proba(inputs[:5], client_id="client 1")
    np.testing.assert_allclose(chances.sum(axis=1), 1)


def test_what_was_learned_is_plain_and_says_what_it_cost(tuned):
    assert tuned.clients_.tolist() == [f"client {number}" for number in range(5)]
    assert tuned.personal_.weight.shape == (5, 10, 64)
    assert isinstance(tuned.shared_.weight, np.ndarray)
    assert tuned.summary_["bits"]["up"] == 650 * 32 * 5 * 30


@pytest.fixture
def routing():
    """scikit-learn's metadata routing, switched on for a test."""
    with sklearn.config_context(enable_metadata_routing=True):
        yield


@pytest.mark.slow
def test_cross_validation_hands_client_ids_to_every_fold(digits, routing):
    inputs, names, ids = digits
    tuned = FederatedClassifier(algorithm="finetune", **QUICK)
    scores = cross_val_score(tuned, inputs, names, params={"client_ids": ids}, cv=2)
    # Ten classes are hard at 30 rounds, two per client are easy: ids were used.
    assert scores.min() > 0.93


@pytest.mark.slow
def test_it_is_searched_inside_a_pipeline(digits, routing):
    inputs, names, ids = (part[:300] for part in digits)
    asking: Any = FederatedClassifier(**{**QUICK, "rounds": 3})
    asking.set_fit_request(client_ids=True).set_score_request(client_ids=True)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), asking),
        {"federatedclassifier__rate": [1e-6, 0.1]},
        cv=list(StratifiedKFold(2).split(inputs, names))[:1],
        refit=False,
    )
    search.fit(inputs, names, client_ids=ids)
    assert search.best_params_ == {"federatedclassifier__rate": 0.1}


def test_a_regressor_finds_the_least_squares_line():
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(200, 3))
    targets = inputs @ np.array([[1.0, 0], [2, 1], [0, 3]]) + 0.5
    targets += 0.1 * draw.normal(size=targets.shape)
    ours = FederatedRegressor(rounds=50, rate=0.1, steps=5, batch_size=None)
    ours.fit(inputs, targets, client_ids=np.arange(200) % 4)
    theirs = LinearRegression().fit(inputs, targets)
    np.testing.assert_allclose(ours.shared_.weight, theirs.coef_, atol=0.02)
    assert ours.predict(inputs).shape == targets.shape
    assert ours.score(inputs, targets) == pytest.approx(theirs.score(inputs, targets), abs=1e-3)  # noqa: E501  # fmt: skip


def test_models_and_algorithms_of_ones_own(digits):
    inputs, names, ids = (part[:200] for part in digits)
    binary = np.where(names < "digit 5", "low", "high")

    def proximal(loss):
        return fb.algorithms.fedprox(loss, fb.Work(0.5, steps=2, batch_size=10), mu=0.1)

    ours = FederatedClassifier(fb.models.mlp(64, 2, hidden=(8,)), proximal, rounds=5)
    copy: Any = clone(ours)
    assert copy.get_params()["algorithm"] is proximal
    assert copy.fit(inputs, binary, client_ids=ids).score(inputs, binary) > 0.6
    single = FederatedClassifier("logistic", **{**QUICK, "rounds": 5, "l2": 1e-3})
    single.fit(inputs, binary)
    assert jax.tree.leaves(single.shared_)[0].shape == (1, 64)
    assert single.predict_proba(inputs).shape == (200, 2)


@pytest.mark.parametrize(
    "change, arguments, message",
    [
        ({"algorithm": "fedprox"}, {}, "'fedprox' is not one of finetune"),
        ({"cohort": 9}, {}, "cohort: 9 is not between 1 and the 1 clients"),
        ({}, {"client_ids": [1, 2]}, "inconsistent numbers of samples"),
        ({"model": "sofmax"}, {}, "did you mean 'softmax'"),
        ({"model": 3}, {}, "FederatedClassifier: model: 3 is not the name of a model"),
        ({"algorithm": ["fedavg"]}, {}, r"algorithm: \['fedavg'\] is not one of"),
        ({"rate": np.float32(-1)}, {}, "Classifier: rate: -1.0 is not a number of at"),
        ({"steps": [1, 2]}, {}, "steps: an array of 2 is not one value, or one for ea"),
        ({"batch_size": 0}, {}, "batch_size: 0 is not a whole number of at least 1"),
        ({"rounds": 2.5}, {}, "rounds: 2.5 is not a whole number of at least 0"),
        ({"l2": float("nan")}, {}, "Classifier: l2: nan is not a number of at least 0"),
        ({"seed": -1}, {}, "Classifier: seed: -1 is not a whole number"),
    ],
)
def test_bad_arguments_are_one_clear_line(digits, change, arguments, message):
    inputs, names, _ = (part[:50] for part in digits)
    with pytest.raises(ValueError, match=message):
        FederatedClassifier(**change).fit(inputs, names, **arguments)


def test_predicting_needs_a_fit_and_one_kind_of_id(digits, tuned):
    with pytest.raises(NotFittedError):
        FederatedClassifier().predict(digits[0])
    with pytest.raises(ValueError, match="one of them, not both"):
        tuned.predict(digits[0], client_id="a", client_ids=digits[2])


def test_an_estimator_survives_being_stored(digits, tuned):
    import joblib

    file = io.BytesIO()
    joblib.dump(tuned, file)
    file.seek(0)
    again = joblib.load(file)
    inputs, _, ids = digits
    np.testing.assert_array_equal(
        again.predict(inputs, client_ids=ids), tuned.predict(inputs, client_ids=ids)
    )


# A few of scikit-learn's own checks; all of them pass, but take some minutes.
CHECKS = (
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_n_features_in",
    "check_estimators_nan_inf",
    "check_fit2d_1feature",
    "check_methods_subset_invariance",
)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("kind", [FederatedClassifier, FederatedRegressor])
def test_scikit_learn_finds_what_it_expects(kind, name):
    # Their inputs are not scaled: with larger steps a regression diverges, and says so.
    getattr(estimator_checks, name)(kind.__name__, kind(rounds=3, rate=0.001))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FederatedClassifier, FederatedRegressor])
def test_scikit_learn_finds_all_it_expects(kind):
    results = estimator_checks.check_estimator(kind(rounds=30), on_skip=None)
    assert len(results) > 50


@pytest.fixture(scope="module")
def visits():
    """A frame as it comes: text, dates, missing values; three hospitals."""
    pandas = pytest.importorskip("pandas")
    draw, rows = np.random.default_rng(0), 240
    age = draw.normal(60.0, 10.0, rows)
    ward = draw.choice(["icu", "surgery"], rows)
    frame = pandas.DataFrame(
        {
            "age": np.where(draw.random(rows) < 0.1, np.nan, age),
            "ward": ward,
            "admitted": pandas.Timestamp("2023-01-01")
            + pandas.to_timedelta(draw.integers(0, 500, rows), unit="D"),
        }
    )
    outcome = np.where(age + 8 * (ward == "icu") > 66, "died", "recovered")
    return frame, outcome, draw.choice(["A", "B", "C"], rows)


def test_a_mixed_frame_is_preprocessed(visits):
    frame, outcome, ids = visits
    classifier: Any = FederatedClassifier(**QUICK).fit(frame, outcome, client_ids=ids)
    assert classifier.n_features_in_ == 3
    assert classifier.feature_names_in_.tolist() == list(frame.columns)
    assert classifier.preprocessing_.features[:2] == ("age", "age missing")
    present = frame[["age"]].to_numpy()
    theirs: Any = StandardScaler().fit(present)
    mine = classifier.preprocessing_.fitted[0]
    assert mine.mean == pytest.approx(theirs.mean_[0], rel=1e-12)
    assert mine.deviation == pytest.approx(theirs.scale_[0], rel=1e-12)
    assert classifier.score(frame, outcome) > 0.85
    assert set(classifier.predict(frame[:20])) <= {"died", "recovered"}
    again: Any = clone(classifier)
    again.fit(frame, outcome, client_ids=ids)
    np.testing.assert_array_equal(
        again.predict_proba(frame), classifier.predict_proba(frame)
    )
    with pytest.raises(ValueError, match="no column 'ward'"):
        classifier.predict(frame.drop(columns="ward"))
    age = FederatedRegressor(rounds=2).fit(frame[["ward", "admitted"]], frame.index)
    assert age.predict(frame[["ward", "admitted"]]).shape == (len(frame),)
