# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend auto --once``: the comparison of linear methods by letters alone."""

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

import fedblend as fb
from fedblend.config.build import build
from fedblend.data.dataset import DataError
from fedblend.runs.auto.candidates import CANDIDATES, Request, configuration
from fedblend.runs.auto.contest import Contest
from fedblend.runs.auto.letters import divide
from fedblend.runs.auto.tuning import evaluate_linear, measure
from fedblend_reproductions.datasets.download import data_home

LINEAR = [one for one in CANDIDATES if one.model == "linear"]
ONES = {one.name: one for one in LINEAR}


def columns(classes, rows=60, clients=6):
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(clients * rows, 3))
    site = np.repeat(np.arange(clients), rows)
    score = inputs @ [1.0, -1.0, 0.5] + draw.normal(size=clients)[site]
    if classes:
        target = np.where(score + draw.logistic(size=len(site)) > 0, "yes", "no")
    else:
        target = (score + draw.normal(size=len(site))).round(4)
    named = {f"x{place}": values.round(4) for place, values in enumerate(inputs.T)}
    return {"site": [f"s{number}" for number in site], **named, "y": target}


def contest(table, tmp_path, once):
    """The methods on the folds of a table, by letters or by rows."""
    path = tmp_path / "table.csv"
    pd.DataFrame(table).to_csv(path, index=False)
    request = Request(path, "site", "y", once=once)
    config = configuration(request, "fedavg", {"ridge": 0.1}, seeds=[0], validation=0.2)
    return Contest.read(request, *divide(build(config)), {})


def test_letters_of_numbers_tell_what_rows_tell(tmp_path):
    """Settings, and errors of every client on every fold, for every method."""
    found = []
    for once in (True, False):
        of = contest(columns(False), tmp_path, once)
        for candidate in LINEAR:
            assert of.evaluate(candidate, lambda: 1.0)
        found.append(of)
    for name in ONES:
        letters, rows = (of.scores[name] for of in found)
        assert found[0].settings[name] == found[1].settings[name]
        np.testing.assert_allclose(letters.test, rows.test, rtol=1e-6)
        np.testing.assert_allclose(letters.validation, rows.validation, rtol=1e-6)
    assert found[0].numbers == 5 * (4 * 5 // 2 + 4 + 1)
    # A row is held out by one fold, and never trained on there.
    for split, whole in zip(
        found[0].table.to_test, found[1].table.to_test, strict=True
    ):
        assert split.held.counts.sum() == len(whole.held.targets) == 6 * 12
        assert split.train.counts.sum() == 6 * 48


def test_letters_of_classes_end_at_logistic_regression(tmp_path):
    """One model for all: the log loss that scikit-learn has on every fold."""
    found = contest(columns(True), tmp_path, True)
    table = found.table._replace(settings={"fedavg": {"ridge": 0.02}})
    predicted = evaluate_linear(table, ONES["fedavg"], lambda: 1.0)
    measured = measure(table.task, table.to_test, predicted.test)["log_loss"]
    for split, losses in zip(table.to_test, measured, strict=True):
        train, held = split.train, split.held
        fitted = LogisticRegression(C=1 / (0.02 * len(train.targets)), tol=1e-9)
        chance = fitted.fit(train.inputs[:, 1:], train.targets).predict_proba(
            held.inputs[:, 1:]
        )
        expected = [
            log_loss(held.targets[at], chance[at], labels=[0, 1]) for at in held.clients
        ]
        np.testing.assert_allclose(losses, expected, atol=1e-6)
        assert 4 <= train.letters <= 8


def test_settings_by_letters_are_as_good_as_those_by_rows(tmp_path):
    found = contest(columns(True), tmp_path, True)
    rows = contest(columns(True), tmp_path, False)
    for name in ("fedavg", "own_intercepts", "local_only"):
        for of in (found, rows):
            of.evaluate(ONES[name], lambda: 1.0)
        tested = found.methods[name]["test"], rows.methods[name]["test"]
        assert tested[0] == pytest.approx(tested[1], rel=0.005)


def test_the_folder_has_a_verdict_and_a_model(tmp_path):
    table = columns(False, clients=12)
    asked = {"client": "site", "target": "y", "once": True, "quiet": True}
    found = fb.auto(table, **asked, out=tmp_path / "out")
    assert found.deploy == "own_intercepts"
    assert found.verdict[0].startswith("Deploy own intercepts")
    assert found.verdict[3].startswith("Every client sent 75 numbers, once")
    rows = {name: of[:2] for name, of in table.items() if name[0] == "x"}
    assert len(found.predict(rows, client="s1")) == 2


def test_few_rows_are_refused(tmp_path):
    line = "--once: client 's0' has 3 rows in a fold, fewer than 4 coefficients"
    with pytest.raises(DataError, match=line):
        contest(columns(False, rows=19), tmp_path, True)


REAL = {
    "exam_london": ("school", "normexam", ("student",), 395),
    "radon": ("county.name", "log.radon", ("county",), np.inf),
    "cheese": ("RETAILER", "LOG_VOLUME", ("VOLUME", "PRICE"), np.inf),
    "school_ilea": ("school", "exam_score", ("bias",), 2180),
}


@pytest.mark.parametrize("name", REAL)
def test_one_letter_is_the_mixed_model_of_real_rows(name):
    """No gradient is left, of all rows in one place: it is the optimum."""
    packed = data_home() / "tables" / f"{name}.csv.gz"
    if not packed.is_file():
        pytest.skip(f"{packed.name} is not in {data_home()}; see FEDBLEND_DATA")
    client, target, drop, most = REAL[name]
    table = pd.read_csv(packed).drop(columns=[*drop]).dropna()
    owner = np.unique(table.pop(client), return_inverse=True)[1]
    targets = table.pop(target).to_numpy(float)
    inputs = pd.get_dummies(table, drop_first=True).to_numpy(float)
    parts = [np.flatnonzero(owner == own) for own in range(owner.max() + 1)]
    data = fb.federate((inputs, targets), parts)
    found = fb.one_letter(data, level=0.3, slopes=0.01, fewest_rows=0)
    assert found.numbers <= most
    models, center, spread = found.coefficients, inputs.mean(0), inputs.std(0)
    gap = models[owner, 0] + (inputs * models[owner, 1:]).sum(axis=1) - targets
    scaled = (inputs - center) / np.where(spread > 1e-6, spread, np.inf)
    scaled = np.column_stack([np.ones(len(gap)), scaled])
    slope = np.stack([scaled[at].T @ gap[at] for at in parts])
    own = models - found.shared
    own[:, 0] += own[:, 1:] @ center
    own[:, 1:] *= spread
    least = 1e-6 * np.abs(scaled.T @ targets).max()
    np.testing.assert_allclose(slope.sum(axis=0), 0, atol=least)
    weights = 1 / np.array([0.3, *[0.01] * len(spread)])
    np.testing.assert_allclose(slope + weights * own, 0, atol=least)
