# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The models to deploy: the optimum on all rows, as scikit-learn finds it."""

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

from fedblend.runs.auto.candidates import Request, configuration
from fedblend.runs.auto.kept_runs import train_on_all_rows
from fedblend.runs.run_folder import Folder
from fedblend.simulation.serialize import unpack

SITES, ROWS = 3, 40
SITE = np.repeat(np.arange(SITES), ROWS)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A file of patients in which sites differ by their level, and what is in it."""
    draw = np.random.default_rng(0)
    inputs = draw.normal([50, 3], [10, 2], size=(len(SITE), 2)).round(3)
    odds = np.array([-1.0, 0.0, 1.5])[SITE] + 0.1 * (inputs[:, 0] - 50)
    ill = draw.random(len(SITE)) < 1 / (1 + np.exp(-odds))
    path = tmp_path_factory.mktemp("table") / "patients.csv"
    columns = {"site": [f"site {of}" for of in SITE], "age": inputs[:, 0]}
    columns |= {"dose": inputs[:, 1], "ill": np.where(ill, "yes", "no")}
    pd.DataFrame(columns).to_csv(path, index=False)
    return path, (inputs - inputs.mean(axis=0)) / inputs.std(axis=0), ill


def train(table, out, name, setting):
    request = Request(table[0], "site", "ill")
    config = configuration(request, name, setting, seeds=0, kind="binary", test=0.0)
    train_on_all_rows(name, config, setting, out)
    return Folder(out, out)


def stored(path):
    arrays, _ = unpack(path.read_bytes())
    return tuple(arrays[name] for name in sorted(arrays, reverse=True))


def fit(inputs, ill, intercept):
    model = LogisticRegression(C=1.0, fit_intercept=intercept, tol=1e-10, max_iter=999)
    return model.fit(inputs, ill)


def test_own_intercepts_are_those_of_all_rows(table, tmp_path):
    """Own intercepts are columns whose deviation is the root of their variance."""
    ridge, level = 0.01, 0.5
    setting = {"ridge": ridge, "level": level}
    folder = train(table, tmp_path, "own_intercepts", setting)
    _, inputs, ill = table
    unit = 1 / np.sqrt(ridge * len(SITE))
    own = np.eye(SITES)[SITE] * np.sqrt(level)
    found = fit(np.hstack([inputs * unit, own]), ill, True)
    slopes, levels = found.coef_[0, :2] * unit, found.coef_[0, 2:] * np.sqrt(level)
    weight, bias = stored(folder.model(None))
    np.testing.assert_allclose(weight[0], slopes, atol=1e-4)
    np.testing.assert_allclose(bias, found.intercept_, atol=1e-4)
    weight, bias = stored(folder.personal(7))
    np.testing.assert_allclose(weight[:, 0], np.tile(slopes, (SITES, 1)), atol=1e-4)
    np.testing.assert_allclose(bias[:, 0], found.intercept_ + levels, atol=1e-4)


def test_training_alone_is_each_client_on_all_its_rows(table, tmp_path):
    level, slopes = 3.0, 0.2
    folder = train(table, tmp_path, "local_only", {"level": level, "slopes": slopes})
    _, inputs, ill = table
    scales = np.sqrt([level, slopes, slopes])
    columns = np.hstack([np.ones((len(SITE), 1)), inputs]) * scales
    weight, bias = stored(folder.personal(None))
    for site in range(SITES):
        own = site == SITE
        expected = fit(columns[own], ill[own], False).coef_[0] * scales
        np.testing.assert_allclose(bias[site], expected[:1], atol=1e-4)
        np.testing.assert_allclose(weight[site, 0], expected[1:], atol=1e-4)
    assert not any(part.any() for part in stored(folder.model(None)))
