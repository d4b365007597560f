# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Networks and trees in ``auto``: trained as by rounds, and deployed where they pay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

import fedblend as fb
from fedblend.data.dataset import Task
from fedblend.models.tabular import tabular
from fedblend.runs.auto import candidates, comparison, network, verdict
from fedblend.runs.auto.candidates import ALONE, OWN_TREES, POOLED_TREES
from fedblend.runs.auto.linear import PooledRows
from fedblend.runs.auto.reference import evaluate_trees
from fedblend.runs.auto.sentences import sentences
from fedblend.runs.auto.tuning import Split, Table
from fedblend.runs.auto.verdict import MethodScores, decide
from fedblend.selection.network_rounds import EVERY, draw_batches, network_program

COUNTS = np.array([30, 3, 20])
NONE: Any = None
"""What these tests do not read."""


def rows(counts=COUNTS, seed=0, width=4):
    """Two standardized numbers and their ranks, of clients with levels of their own."""
    draw = np.random.default_rng(seed)
    numbers = draw.normal(size=(counts.sum(), 2))
    ranks = 16 * draw.random((counts.sum(), width - 2))
    inputs = np.hstack([np.ones((counts.sum(), 1)), numbers])
    odds = np.repeat(draw.normal(size=len(counts)), counts) + numbers[:, 0]
    targets = (odds + draw.logistic(size=len(odds)) > 0).astype(int)
    return PooledRows(inputs, targets, counts, ranks)


def by_hand(split, rate, own_rate, part, size):
    """The rounds of ``fedopt`` and ``partial``, client by client, Adam by formulas."""
    batches = draw_batches(COUNTS, size, network.ROUNDS, 0)
    model = tabular(4, 1, ranks=2)
    key = jax.random.split(jax.random.key(0), 1)[0]
    params = jax.tree.map(jnp.asarray, model.init(key))
    own = [params.last] * len(COUNTS)
    first = jax.tree.map(jnp.zeros_like, params)
    second, weights = first, COUNTS / COUNTS.sum()
    inputs = np.hstack([split.train.inputs[:, 1:], split.train.ranks]).astype("f4")

    def loss(params, x, y):
        scores = model.apply(params, x)[:, 0]
        return jnp.mean(jnp.logaddexp(0, scores) - y * scores)

    slope_of = jax.jit(jax.grad(loss))

    def mix(params, own):
        last = params.last
        if part == "last":
            last = own
        elif part == "last/bias":
            last = last._replace(bias=own.bias)
        return params._replace(last=last)

    for round in range(EVERY):
        total = jax.tree.map(jnp.zeros_like, params)
        for client in range(len(COUNTS)):
            at = batches[round, client]
            here = mix(params, own[client])
            slope = slope_of(here, inputs[at], split.train.targets[at])
            own[client] = jax.tree.map(
                lambda v, g: v - own_rate * g, own[client], slope.last
            )
            total = jax.tree.map(
                lambda t, g, w=weights[client]: t + w * g, total, slope
            )
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, total)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, total)
        count = round + 1
        params = jax.tree.map(
            lambda p, m, v, t=count: (
                p - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
            ),
            params,
            first,
            second,
        )
    held = np.hstack([split.held.inputs[:, 1:], split.held.ranks]).astype("f4")
    return np.concatenate(
        [
            model.apply(mix(params, own[client]), held[at])
            for client, at in enumerate(split.held.clients)
        ]
    )


@pytest.mark.parametrize(
    ("own_rate", "part"), [(0.0, ""), (0.3, "last/bias"), (0.05, "last")]
)
def test_the_program_takes_the_rounds_of_a_federation(own_rate, part):
    split, size = Split(rows(), rows(seed=1)), 4
    expected = by_hand(split, 0.02, own_rate, part, size)
    rates = 0.02, own_rate * (part == "last/bias"), own_rate * (part == "last")
    most = COUNTS.sum() + 5  # rows are padded
    batches = network._batches([split], most, most, size)
    program = network_program("binary", 4, 2, 1)
    found = program(jax.random.split(jax.random.key(0), 1), batches, rates)
    np.testing.assert_allclose(
        np.asarray(found)[0, 0, : COUNTS.sum()], expected, rtol=2e-3, atol=2e-4
    )


def interaction(clients=10, count=100, seed=0):
    """The sign of a product, which no line sees and trees and networks do."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(clients * count, 2))
    yes = draw.random(len(x)) < expit(6 * np.sign(x[:, 0] * x[:, 1]) * 0.5)
    return {
        "site": np.repeat(np.arange(clients), count),
        "x1": x[:, 0].round(4),
        "x2": x[:, 1].round(4),
        "outcome": np.where(yes, "yes", "no"),
    }


@pytest.fixture(scope="module")
def beyond_lines(tmp_path_factory):
    """The verdict and the folder where lines are the limit, from a few methods."""
    wanted = (ALONE, "fedavg", OWN_TREES, "network", POOLED_TREES)
    some = [one for one in candidates.CANDIDATES if one.name in wanted]
    out = tmp_path_factory.mktemp("network") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "CANDIDATES", some)
        patch.setattr(comparison, "SPLITS", 2)
        return fb.auto(
            interaction(), client="site", target="outcome", out=out, quiet=True
        )


def test_a_network_is_deployed_where_lines_are_the_limit(beyond_lines):
    assert beyond_lines.deploy == "network"
    what = beyond_lines.verdict[0]
    assert what.startswith("Deploy one network") and "with boosted trees" in what
    assert "Linear models are the limit" in what


def test_the_kept_run_of_a_network_is_one_of_fedblend(beyond_lines):
    run = beyond_lines.run()
    assert run.config.model.name == "tabular" and run.config.algorithm.name == "fedopt"
    state = beyond_lines._state
    tested = [one["measures"]["test"]["personal"] for one in run.summary["runs"]]
    ended = np.mean([one["log_loss"]["mean"] for one in tested])
    expected = np.mean(state["methods"]["network"]["by_split"])
    gain = state["findings"]["constant"] - expected
    assert abs(ended - expected) < 0.1 * gain  # other first weights and batches
    corners = {"site": [0] * 4, "x1": [1.5, 1.5, -1.5, -1.5], "x2": [1.5, -1.5] * 2}
    assert list(beyond_lines.predict(corners, client="0")) == ["yes", "no", "no", "yes"]


def test_a_reference_is_never_deployed(beyond_lines):
    rows = {row["method"]: row for row in beyond_lines.table}
    assert POOLED_TREES in rows and "client_column" in rows[POOLED_TREES]["setting"]
    for name in (OWN_TREES, POOLED_TREES):
        assert not candidates.BY_NAME[name].deployable


def scores(values, splits=3, clients=12):
    draw = np.random.default_rng(0)
    noise = 0.001 * draw.normal(size=(splits, clients))
    return MethodScores(values + noise, values + noise)


def test_clients_that_train_trees_are_what_a_method_is_compared_with():
    constants, names = [scores(1.0)], [str(client) for client in range(12)]
    found = {ALONE: scores(0.8), "fedavg": scores(0.7), OWN_TREES: scores(0.6)}
    judged = np.ones(12, bool)
    of = decide(found, constants, names, judged)
    assert of.choice.alone == OWN_TREES and of.answer == "alone"
    shown = {name: verdict.mean(one.test) for name, one in found.items()}
    what = sentences(of, shown, "log loss")[0]
    assert what.startswith("Train alone, with boosted trees: ")
    found[OWN_TREES] = scores(0.799)  # a negligible gain over the linear model
    assert decide(found, constants, names, judged).choice.alone == ALONE


def test_a_negligible_gain_does_not_deploy_a_network():
    constants, names = [scores(1.0)], [str(client) for client in range(12)]
    found = {ALONE: scores(0.9), "fedavg": scores(0.7), "network": scores(0.6995)}
    of = decide(found, constants, names, np.ones(12, bool))
    assert of.choice.best == "network" and of.choice.method == "fedavg"


def test_small_clients_keep_their_linear_model_in_place_of_trees():
    counts = np.array([60, 12])
    split = Split(rows(counts), rows(counts, seed=1))
    setting = {"level": 1.0, "slopes": 1.0}
    task = Task("binary", 1, (4,), ranks=2)
    table = Table(NONE, task, NONE, NONE, [split] * 2, [split] * 2, {ALONE: setting})
    found = evaluate_trees(table, candidates.BY_NAME[OWN_TREES], lambda: 1.0)
    assert found is not None
    from fedblend.runs.auto.tuning import predict

    linear = predict(task, ALONE, [split], setting)[0]
    np.testing.assert_array_equal(found.test[0][60:], linear[60:])
    assert (found.test[0][:60] != linear[:60]).any()


def test_networks_of_huge_tables_are_left_out(monkeypatch):
    monkeypatch.setattr(network, "MOST_ROWS", 10)
    split = Split(rows(), rows(seed=1))
    task = Task("binary", 1, (4,), ranks=2)
    table = Table(NONE, task, NONE, NONE, [split], [split], {})
    one = candidates.BY_NAME["network"]
    assert network.evaluate_network(table, one, lambda: 1.0) is None
