# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``auto`` on counts: Poisson models at their optimum, and runs that are kept."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import mean_poisson_deviance

import fedblend as fb
from fedblend.data.dataset import Task
from fedblend.runs import run_folder
from fedblend.runs.auto import comparison, tuning
from fedblend.runs.auto.candidates import BY_NAME
from fedblend.runs.auto.linear import PooledRows, hierarchical_models
from fedblend.runs.auto.reference import evaluate_trees
from fedblend.simulation.compile import Programs
from fedblend.stats.constant_baseline import constant_losses

DRAW = np.random.default_rng(0)
COUNTS = np.array([40, 15, 25])
INPUTS = np.hstack([np.ones((80, 1)), DRAW.normal(size=(80, 2))])
LEVEL = np.repeat([0.5, -1.0, 1.5], COUNTS)
ROWS = PooledRows(
    INPUTS, DRAW.poisson(np.exp(LEVEL + INPUTS[:, 1] / 2)).astype(float), COUNTS
)


def test_one_model_for_all_is_poisson_regression():
    found = hierarchical_models("counts", ROWS, 1, ridge=0.1)[0]
    fitted = PoissonRegressor(alpha=0.1, tol=1e-9).fit(INPUTS[:, 1:], ROWS.targets)
    expected = [fitted.intercept_, *fitted.coef_]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_own_intercepts_minimize_the_likelihood_with_its_penalty():
    level, owner = 0.3, np.repeat(np.arange(3), COUNTS)

    def value(here):
        score = INPUTS @ here[:3] + here[3:][owner]
        likelihood = (np.exp(score) - ROWS.targets * score).sum()
        return likelihood + (here[3:] ** 2).sum() / (2 * level)

    least = minimize(value, np.zeros(6), method="BFGS", options={"gtol": 1e-8}).x
    found = hierarchical_models("counts", ROWS, 1, level=level)
    np.testing.assert_allclose(found[:, 0], least[0] + least[3:], atol=1e-4)
    np.testing.assert_allclose(found[:, 1:], np.tile(least[1:3], (3, 1)), atol=1e-4)


def test_the_criterion_is_the_deviance_in_the_unit_of_the_table():
    task = Task("counts", 1, (2,), center=1.25)
    mean = np.exp(INPUTS[:, 1])
    held = PooledRows(INPUTS, task.change_unit(ROWS.targets), COUNTS)
    scores = np.log(mean)[:, None] - task.center
    found = tuning.measure(task, [tuning.Split(held, held)], [scores])
    for client, at in enumerate(held.clients):
        expected = mean_poisson_deviance(ROWS.targets[at], mean[at])
        assert found["deviance"][0, client] == pytest.approx(expected)
        gap = np.abs(ROWS.targets[at] - mean[at]).mean()
        assert found["mae"][0, client] == pytest.approx(gap)


def test_constants_are_means_and_never_zero():
    y = np.array([0, 0, 0, 0, 1, 2, 3, 2], np.float32)
    rows = np.zeros((8, 1), np.float32), y
    parts = [np.arange(4), np.arange(4, 8)]
    data = fb.federate(rows, parts, test=0.25)
    found = constant_losses(data, "counts", 1, "test")
    train = [data.train.rows(client)[1] for client in range(2)]
    whole = np.concatenate(train)
    for client, own in enumerate(train):
        held = data.splits["test"].rows(client)[1]
        for place, known in enumerate((whole, own)):
            mean = (known.sum() + whole.mean()) / (len(known) + 1)
            expected = mean_poisson_deviance(held, np.full(len(held), mean))
            assert found[place, client] == pytest.approx(expected, 1e-4)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    draw = np.random.default_rng(3)
    ward = np.repeat([f"ward {place}" for place in range(12)], 30)
    level, age = np.repeat(draw.normal(0, 0.8, 12), 30), draw.normal(size=360)
    table = {
        "ward": ward,
        "age": age.round(4),
        "falls": draw.poisson(np.exp(0.5 + level + age / 2)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "SPLITS", 3)
        lines, out = [], tmp_path_factory.mktemp("auto") / "out"
        asked = {"client": "ward", "target": "falls", "out": out}
        compiled, compile = [], Programs._compile

        def note(self, program, *arguments):
            compiled.append(program.name)
            return compile(self, program, *arguments)

        patch.setattr(Programs, "_compile", note)
        auto = fb.auto(table, **asked, screen=comparison.Screen(lines.append))
    return auto, lines, table, compiled


def test_counts_are_seen_and_compared_by_their_deviance(found):
    auto, lines, *_ = found
    assert any("The target is a count" in line for line in lines)
    assert auto.metric == "deviance" and "flix" not in auto.titles
    assert auto.deploy == "own_intercepts", auto.verdict
    assert "Poisson deviance" in auto.verdict[0]


def test_kept_runs_have_the_scores_of_the_verdict(found):
    auto, _, table, _ = found
    state = run_folder.read_json(auto.folder / "auto.json")
    for method in ("local_only", "fedavg", "own_intercepts"):
        runs = auto.run(method).summary["runs"]
        means = [run["measures"]["test"]["personal"]["deviance"] for run in runs]
        expected = state["methods"][method]["test"]
        assert np.mean([one["mean"] for one in means]) == pytest.approx(expected, 1e-3)
    rows = {"age": table["age"][:30]}
    falls = auto.predict(rows, client="ward 0")
    assert falls.mean() == pytest.approx(table["falls"][:30].mean(), rel=0.25)


def test_one_program_runs_one_model_for_all_and_own_intercepts(found):
    """Training alone, whose messages are others, has another."""
    compiled = found[3]
    assert compiled.count("block") == compiled.count("measure") == 2


def test_trees_predict_logarithms_of_means():
    task = Task("counts", 1, (2,))
    split = tuning.Split(ROWS, ROWS)
    table = tuning.Table(None, task, None, None, [split] * 2, [split] * 2, {})  # type: ignore
    made = evaluate_trees(table, BY_NAME["pooled_trees"], lambda: 1.0)
    assert made is not None
    means = np.exp(made.test[0][:, 0])
    assert means.mean() == pytest.approx(ROWS.targets.mean(), rel=0.05)
    constant = np.full(80, ROWS.targets.mean())
    assert mean_poisson_deviance(ROWS.targets, means) < 0.7 * mean_poisson_deviance(
        ROWS.targets, constant
    )
