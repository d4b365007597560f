# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The models of ``auto``: exact, tuned on validation rows, as good as ridge."""

import csv
import gzip
import io
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import roc_auc_score

import fedblend as fb
import known_tables
from fedblend.config.build import build
from fedblend.data.dataset import Task
from fedblend.runs.auto import comparison, description, tuning
from fedblend.runs.auto.candidates import CANDIDATES, Request, configuration
from fedblend.runs.auto.comparison import AutoComparison, Screen
from fedblend.runs.auto.linear import PooledRows, flix_models, hierarchical_models
from fedblend.stats.constant_baseline import constant_losses
from fedblend.trees import precision
from fedblend_reproductions.datasets.download import data_home

LINEAR = [one for one in CANDIDATES if one.model == "linear"]
DRAW = np.random.default_rng(0)
COUNTS = np.array([30, 12, 45, 8])
INPUTS = np.hstack([np.ones((95, 1)), DRAW.normal(size=(95, 3))])
SCORE = INPUTS @ [0.5, 1.0, -1.0, 0.3] + np.repeat([1.0, -1.0, 0.0, 2.0], COUNTS)
NUMBERS = PooledRows(INPUTS, SCORE + DRAW.normal(size=95), COUNTS)
CLASSES = PooledRows(INPUTS, (SCORE + DRAW.logistic(size=95) > 0).astype(int), COUNTS)


def test_one_model_for_all_is_ridge():
    found = hierarchical_models("regression", NUMBERS, 1, ridge=0.1)
    ridge = Ridge(alpha=0.1 * 95).fit(INPUTS[:, 1:], NUMBERS.targets)
    expected = [ridge.intercept_, *ridge.coef_]
    np.testing.assert_allclose(found, np.tile(expected, (4, 1)), rtol=1e-6)


def test_one_model_for_all_is_logistic_regression():
    found = hierarchical_models("binary", CLASSES, 1, ridge=0.1)
    fitted = LogisticRegression(C=1 / (0.1 * 95), tol=1e-10).fit(
        INPUTS[:, 1:], CLASSES.targets
    )
    expected = [*fitted.intercept_, *fitted.coef_[0]]
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)


def test_alone_is_ridge_of_each_client():
    options = {"level": 1e12, "slopes": 0.5, "share": False}
    found = hierarchical_models("regression", NUMBERS, 1, **options)
    for at, model in zip(NUMBERS.clients, found, strict=True):
        ridge = Ridge(alpha=2.0).fit(INPUTS[at, 1:], NUMBERS.targets[at])
        np.testing.assert_allclose(model, [ridge.intercept_, *ridge.coef_], rtol=1e-5)


@pytest.mark.parametrize("kind", ["regression", "binary", "classes"])
def test_clients_with_few_rows_are_solved_in_the_space_of_their_rows(kind):
    """One more client, with many rows, switches that off, and changes no other."""
    draw, outputs = np.random.default_rng(2), 3 if kind == "classes" else 1
    inputs = np.hstack([np.ones((60, 1)), draw.normal(size=(60, 15))])
    targets = {
        "regression": draw.normal(size=60),
        "binary": draw.integers(0, 2, 60),
        "classes": draw.integers(0, 3, 60),
    }[kind]
    options: dict = {"level": 4.0, "slopes": 0.5, "share": False}
    few = PooledRows(inputs[:17], targets[:17], np.array([7, 1, 0, 5, 4]))
    more = PooledRows(inputs, targets, np.array([7, 1, 0, 5, 4, 43]))
    found, expected = (
        hierarchical_models(kind, rows, outputs, **options) for rows in (few, more)
    )
    np.testing.assert_allclose(found, expected[:5], rtol=2e-3, atol=2e-5)


def test_few_rows_of_each_client_share_a_model():
    """Shared and own entries as columns of one penalized logistic regression."""
    draw, counts = np.random.default_rng(3), np.array([6, 3, 0, 5, 4, 2])
    owner, rows = np.repeat(np.arange(6), counts), np.arange(20)
    inputs = np.hstack([np.ones((20, 1)), draw.normal(size=(20, 14))])
    targets = draw.integers(0, 2, 20)
    options: dict = {"level": 0.7, "slopes": 0.2, "ridge": 0.05}
    found = hierarchical_models(
        "binary", PooledRows(inputs, targets, counts), 1, **options
    )
    scale = np.sqrt([0.7, *[0.2] * 14])
    own = np.zeros((20, 6, 15))
    own[rows, owner] = inputs * scale
    columns = np.hstack([inputs[:, 1:], own.reshape(20, -1)])
    wide = columns / np.r_[[np.sqrt(20 * 0.05)] * 14, [1.0] * 90]
    fitted = LogisticRegression(C=1.0, tol=1e-12, max_iter=10_000).fit(wide, targets)
    shared = np.r_[fitted.intercept_, fitted.coef_[0, :14] / np.sqrt(20 * 0.05)]
    expected = shared + fitted.coef_[0, 14:].reshape(6, 15) * scale
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_flix_minimizes_its_objective():
    """No entry of the shared model can be moved to a smaller mean of mixtures."""
    alpha, l2 = 0.4, 0.05
    mixtures = flix_models("binary", CLASSES, 1, alpha=alpha, l2=l2)
    alone = flix_models("binary", CLASSES, 1, alpha=1e-9, l2=l2)
    shared = (mixtures - (1 - alpha) * alone) / alpha
    np.testing.assert_allclose(shared, np.tile(shared[0], (4, 1)), atol=1e-6)

    def value(shared):
        models = alpha * shared + (1 - alpha) * alone
        scores = CLASSES.scores(models)
        each = tuning.linear.losses("binary", scores, CLASSES.targets)
        means = tuning.client_means(each, COUNTS) + l2 / 2 * (models**2).sum(axis=1)
        return means.mean()

    least = value(shared[0])
    for move in np.vstack([np.eye(4), -np.eye(4)]):
        assert value(shared[0] + 1e-3 * move) > least


def test_metrics_against_scikit_learn():
    split = tuning.Split(CLASSES, CLASSES)
    task = Task("binary", 1, (3,))
    scores = tuning.predict(task, "fedavg", [split], {"ridge": 0.1})
    found = tuning.measure(task, [split], scores)
    scores = CLASSES.scores(hierarchical_models("binary", CLASSES, 1, ridge=0.1))
    assert np.isnan(found["auc"][0, 3])  # rows of one class only
    for client, at in enumerate(CLASSES.clients[:3]):
        area = roc_auc_score(CLASSES.targets[at], scores[at, 0])
        assert found["auc"][0, client] == pytest.approx(area)


@pytest.mark.parametrize("candidate", LINEAR, ids=lambda one: one.name)
def test_configurations_have_the_setting(candidate, tmp_path):
    request = Request(tmp_path / "t.csv", "hospital", "outcome", drop=("id",))
    setting = dict(candidate.first)
    config = configuration(request, candidate.name, setting, seeds=[0, 1])
    assert config.run.seed == [0, 1] and config.data.drop == ["id"]
    for key, value in setting.items():
        assert getattr(config.model if key == "l2" else config.algorithm, key) == value


def test_settings_are_found_wherever_the_search_begins():
    """Slopes that barely differ: their variance is small, not where it began."""
    task = Task("regression", 1, (3,))
    draw = np.random.default_rng(1)
    counts = np.full(40, 30)
    inputs = np.hstack([np.ones((1200, 1)), draw.normal(size=(1200, 3))])
    targets = inputs @ [0, 1, 1, 1]
    train, held = (
        PooledRows(inputs, targets + draw.normal(size=1200), counts) for _ in "ab"
    )
    chosen, done = tuning.tune(
        task, CANDIDATES[3], [tuning.Split(train, held)], {}, lambda: True, {}
    )
    assert done and chosen["slopes"] < 1e-3 and chosen["level"] < 0.1


def test_a_client_of_one_class_is_not_certain():
    """Its validation rows agree that it is, and three other clients do not mind."""
    draw, counts = np.random.default_rng(5), np.array([30, 40, 40, 40])

    def rows() -> PooledRows:
        inputs = np.hstack([np.ones((150, 1)), draw.normal(size=(150, 2))])
        targets = (inputs[:, 1] + draw.logistic(size=150) > 0).astype(int)
        return PooledRows(inputs, np.r_[np.ones(30, int), targets[30:]], counts)

    split = tuning.Split(rows(), rows())
    task = Task("binary", 1, (2,))
    for one in CANDIDATES[0], CANDIDATES[2]:
        chosen, _ = tuning.tune(task, one, [split], {}, lambda: True, {})
        chance = expit(tuning.predict(task, one.name, [split], chosen)[0][:30])
        assert 0.9 < chance.mean() < 1 - 1 / 150


def distance(found: AutoComparison) -> float:
    """How far the method to deploy is from the best ridge regression.

    In parts of the way from the best constant to it, on the same test rows; its
    penalties are chosen by leaving out single rows.
    """
    config = found._config("fedavg", list(range(comparison.SPLITS)), validation=0.0)
    built = build(config)
    alone, pooled, constants = [], [], []
    for data in built.federations:
        train, test = PooledRows.read(data.train), PooledRows.read(data.splits["test"])
        y, tested = train.targets.astype(float), test.targets.astype(float)
        together = RidgeCV(np.logspace(-3, 3, 13)).fit(train.inputs[:, 1:], y)
        errors = (together.predict(test.inputs[:, 1:]) - tested) ** 2
        pooled.append(np.nanmean(tuning.client_means(errors, test.counts)))
        own = []
        for at, to in zip(train.clients, test.clients, strict=True):
            if not test.inputs[to].size:
                continue
            ridge = RidgeCV(np.logspace(-3, 3, 13)) if len(y[at]) > 3 else Ridge()
            ridge.fit(train.inputs[at, 1:], y[at])
            own.append(np.mean((ridge.predict(test.inputs[to, 1:]) - tested[to]) ** 2))
        alone.append(np.mean(own))
        each = constant_losses(data, "regression", 1, "test")
        constants.append(np.nanmean(each, axis=1))
    best, least = min(np.mean(alone), np.mean(pooled)), np.mean(constants, axis=0).min()
    deploy = found.state["findings"]["choice"]["method"]
    return (found.state["methods"][deploy]["test"] - best) / max(least - best, 1e-300)


def check_numbers(found: AutoComparison) -> None:
    state = found.state
    assert all(np.isfinite(of["test"]) for of in state["methods"].values())
    assert not any("not_trained" in of for of in state["methods"].values())
    if state["deploy"] is not None:
        assert distance(found) < 0.05, state["verdict"]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 21))]
)
def test_complete_numbers_in_any_unit(seed, tmp_path):
    check_numbers(known_tables.judge(known_tables.numbers(seed), tmp_path))


REAL = {
    "exam_london": ("school", "normexam", ("student",)),
    "radon": ("county.name", "log.radon", ("county",)),
    "cheese": ("RETAILER", "LOG_VOLUME", ("VOLUME", "PRICE")),
    "school_ilea": ("school", "exam_score", ("bias",)),
    "communities": ("state", "log_crimes", ()),
}


def log_crimes(text: str) -> str:
    """The table of communities with the logarithm of violent crimes as its target.

    Without names, codes and the other columns of crimes, which begin at murders.
    """
    head, *rows = csv.reader(io.StringIO(text))
    target = head.index("ViolentCrimesPerPop")
    inputs = range(head.index("population"), head.index("murders"))
    kept = [head.index("state"), *inputs]
    out = io.StringIO()
    table = csv.writer(out)
    table.writerow([*(head[at] for at in kept), "log_crimes"])
    for row in rows:
        if row[target]:
            log = math.log1p(float(row[target]))
            table.writerow([*(row[at] for at in kept), log])
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_tables_of_numbers(name, tmp_path):
    place = data_home() / "tables" / f"{name}.csv.gz"
    if not place.is_file():
        pytest.skip("the real tables are not here")
    path = tmp_path / f"{name}.csv"
    text = gzip.decompress(place.read_bytes()).decode()
    path.write_text(log_crimes(text) if name == "communities" else text)
    client, target, drop = REAL[name]
    request = Request(path, client, target, drop=drop)
    found = AutoComparison(request, tmp_path / "out", 5, Screen())
    with precision("float32"):
        found.judge()
    assert found.state["deploy"] is not None
    check_numbers(found)


@pytest.mark.parametrize(
    ("kind", "case", "seed"),
    [
        ("binary", "nothing", 0),
        ("regression", "alone", 0),
        ("regression", "one for all", 1),
        ("regression", "mixture", 0),
    ],
)
def test_truth_is_found(kind, case, seed):
    _, right, said = known_tables.judge_truth((kind, case, seed))
    assert right, said


@pytest.mark.slow
@pytest.mark.parametrize("case", known_tables.TRUTHS)
@pytest.mark.parametrize("kind", known_tables.KINDS)
def test_truth_is_found_nearly_always(kind, case):
    """Of 20 tables 19, and 16 where shared and own models are mixed."""
    found = [known_tables.judge_truth((kind, case, seed)) for seed in range(20)]
    wrong = [said for _, right, said in found if not right]
    assert len(wrong) <= (4 if case == "mixture" else 1), wrong


def test_variance_between_clients_is_that_of_an_anova():
    """The F statistic by scipy; the share less chance is epsilon squared."""
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(5), [10, 20, 30, 15, 25])
    values = draw.normal(size=(100, 1)) + owner[:, None] * 0.3
    f = stats.f_oneway(*(values[owner == i, 0] for i in range(5))).statistic
    expected = (f - 1) * 4 / (f * 4 + 95)
    assert description.variance_between(values, owner)[0] == pytest.approx(expected)
    assert description.variance_between(np.ones((100, 1)), owner)[0] == 0


def test_constants_against_closed_form():
    targets = np.array([0, 0, 0, 1] * 5 + [1, 1, 1, 0] * 5)
    rows = np.zeros((40, 1), np.float32), targets
    parts = [np.arange(20), np.arange(20, 40)]
    data = fb.federate(rows, parts, validation=0.2, test=0.2)
    found = constant_losses(data, "binary", 1, "test")
    train = data.train.rows(0)[1]
    ones = (train.sum() + 1) / (len(train) + 2)
    tested = data.splits["test"].rows(0)[1]
    expected = -np.mean(np.where(tested == 1, np.log(ones), np.log(1 - ones)))
    assert found[1, 0] == pytest.approx(expected)
    assert found.shape == (2, 2)
