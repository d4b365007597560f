# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Arms chosen by cross-validation: runs one by one, planted clients, bad input."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.selection.arm_costs import ClientCosts
from fedblend.selection.arms import (
    Arm,
    average_costs,
    can_average,
    mix_costs,
)
from fedblend.selection.choose import (
    GUARD,
    REASONS,
    decisions_without_folds,
    finite_arms,
)

DIM, ALIKE, ROUNDS, KEY = 4, 8, 20, jax.random.key(3)
GRID = (1.0, 0.0, 0.5)
loss = fb.losses.squared_error(lambda params, inputs: inputs @ params)
MEASURE = {"mse": fb.metrics.mean_squared_error(lambda p, x: x @ p)}
WORK = fb.Work(0.05, steps=3, batch_size=2)
start = jnp.zeros(DIM)


@cache
def federated_data() -> fb.FederatedData:
    """Some clients of few rows that follow one rule, then two that follow its opposite.

    The last of those has many rows, the other too few for a fold.
    """
    rng = np.random.default_rng(0)
    rule, counts = rng.standard_normal(DIM) * 2, [14] * ALIKE + [3, 150]
    inputs = rng.standard_normal((sum(counts), DIM))
    sign = np.repeat([1] * ALIKE + [-1, -1], counts)
    targets = sign * (inputs @ rule) + 2 * rng.standard_normal(sum(counts))
    rows = inputs.astype(np.float32), targets.astype(np.float32)
    parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    return fb.federate(rows, parts, test=0.2)


def apfl(alpha):
    return fb.apfl(loss, WORK, alpha=alpha, learn="fixed")


def choose(data=None, build=apfl, **changed):
    usual = {"rounds": ROUNDS, "measure": MEASURE, "alphas": GRID, "folds": 4}
    return fb.choose(
        build, start, data or federated_data(), **{"key": KEY, **usual, **changed}
    )


@cache
def chosen():
    return choose(alone=fb.local_only(loss, WORK))


def alone(data, algorithm, splits, rounds=ROUNDS):
    return fb.simulate(
        algorithm,
        start,
        data,
        KEY,
        rounds=rounds,
        every=rounds,
        measure=MEASURE,
        splits=splits,
    ).complete()


@pytest.mark.slow
def test_folds_and_alphas_are_the_runs_that_they_would_be_alone():
    found = chosen()
    assert found.names == ("alone", "0", "0.5", "1")
    third = fb.data.folds(federated_data(), 4)[2]
    held = third.validation
    assert held is not None
    run = alone(third, apfl(0.5), ["validation"])
    for client in (0, ALIKE + 1):
        inputs, targets = held.rows(client)
        expected = (inputs @ np.asarray(run.personal(client)) - targets) ** 2
        many = len(expected)
        own = found.arms[2].costs[client][2 * many : 3 * many]
        np.testing.assert_allclose(own, expected, rtol=1e-3)


@pytest.mark.slow
def test_what_is_deployed_is_trained_on_all_rows():
    found = chosen()
    again = alone(federated_data(), apfl(0.5), ["test"])
    np.testing.assert_allclose(
        found.arms[2].personal(1), again.personal(1), rtol=1e-4, atol=1e-5
    )
    own = found.arms[0]
    trained = alone(
        federated_data(), fb.local_only(loss, WORK), ["test"], own.run.rounds
    )
    np.testing.assert_allclose(own.personal(1), trained.personal(1), rtol=1e-4)
    for client in range(ALIKE + 2):
        models = np.stack([arm.personal(client) for arm in found.arms])
        average = found.decisions[client].best @ models
        np.testing.assert_allclose(found.personal(client), average, rtol=1e-5)
    test = federated_data().test
    assert test is not None
    inputs, targets = test.rows(0)
    squares = (inputs @ np.asarray(found.personal(0)) - targets) ** 2
    assert found.deployed_test is not None
    assert found.deployed_test[0] == pytest.approx(squares.mean(), rel=1e-5)
    assert found.test is not None
    expected = again.measured[0]["test"]["personal"]["mse"]
    np.testing.assert_allclose(found.test[2], expected, rtol=1e-3)


def in_folds(metric, scale=1.0):
    """Whether averages keep the bound; ``scale`` exaggerates what arms cost."""
    found = chosen()
    arms = [
        arm._replace(costs=[scale * rows for rows in arm.costs]) for arm in found.arms
    ]
    parts = fb.data.folds(federated_data(), 4)
    return average_costs(arms, np.stack([found.weights] * 4), parts, metric) is not None


@pytest.mark.slow
def test_averages_are_measured_in_the_folds():
    """Squared errors are convex, so averages keep the bound; half of it is too little.

    The metric that is large wherever a model is no arm's own is one that averages
    break, as those of networks may.
    """
    assert ((chosen().weights > 0).sum(axis=1) > 1).any()
    assert in_folds(MEASURE["mse"])
    assert not in_folds(MEASURE["mse"], scale=0.5)
    rows = MEASURE["mse"].with_rows
    assert rows is not None
    barrier = dataclasses.replace(
        MEASURE["mse"],
        with_rows=lambda model, batch: jax.tree.map(
            lambda costs: costs + 1e3, rows(model, batch)
        ),
    )
    assert not in_folds(barrier)
    sure = chosen()._replace(weights=np.eye(4)[chosen().chosen])
    np.testing.assert_array_equal(
        sure.personal(2), sure.arms[sure.chosen[2]].personal(2)
    )


def test_models_of_other_shapes_or_of_whole_numbers_are_not_averaged():
    assert can_average([jnp.ones(2), jnp.zeros(2)])
    assert not can_average([jnp.ones(2), jnp.ones(3)])
    assert not can_average([(jnp.ones(2), jnp.arange(3))] * 2)


def test_who_shares_and_why():
    found = chosen()
    arms = [found.names[arm] for arm in found.chosen]
    assert arms[-1] in ("alone", "0")  # unlike the others, with many rows
    price = [one.expected[3] - one.expected[0] for one in found.decisions]
    assert max(price[:ALIKE]) < price[-1] / 2  # of the shared model, to training alone
    assert found.references == (0, 3)
    assert found.reasons[ALIKE] == "no rows"
    assert set(found.reasons) <= set(REASONS)
    for client, decision in enumerate(found.decisions):
        guarded = decision.expected + GUARD * decision.harm
        assert guarded[found.chosen[client]] == guarded.min()
        assert decision.best.sum() == pytest.approx(1)
        told = found.reasons[client]
        assert (told == "guard") <= (decision.arm != decision.unguarded)
    validated = found.cross_validation
    assert np.isnan(validated[:, ALIKE]).all()
    costs = np.mean([rows.mean() for rows in found.arms[1].costs if rows.size])
    assert np.nanmean(validated[1]) == pytest.approx(costs)


@pytest.mark.slow
def test_methods_are_arms_by_name():
    """More is better for the accuracy of a sign, whose cost is its negative."""
    right = fb.metrics.accuracy(lambda p, x: x @ p)
    inputs, targets = federated_data().train.examples
    train = dataclasses.replace(
        federated_data().train, examples=(inputs, (targets > 0).astype(np.float32))
    )
    methods = {"mixed": apfl(0.5), "shared": fb.fedavg(loss, WORK)}
    found = choose(
        fb.FederatedData(train),
        methods,
        measure={"accuracy": right},
        rounds=3,
        folds=2,
        references=["shared"],
    )
    assert found.names == ("mixed", "shared")
    assert found.references == (1,)
    assert found.test is None
    assert np.nanmin(found.cross_validation) >= 0
    assert all(decision.expected.max() < 0 for decision in found.decisions)
    shared = [found.arms[1].personal(client) for client in (0, 1)]
    np.testing.assert_array_equal(*shared)


def test_what_a_fold_states_is_chosen_by_the_others():
    """Rows of a fold change what all folds but this one decide."""
    rng = np.random.default_rng(0)
    costs = rng.gamma(1.0, 1.0, (6, 3, 4, 2))  # clients, folds, rows, arms
    other = costs.copy()
    other[:, 1] *= [1.0, 50.0]

    def decided(each):
        clients = [ClientCosts(own.reshape(-1, 2), 8, deployed=12) for own in each]
        unknown = ClientCosts(np.zeros((0, 2)), 1, deployed=2)
        return decisions_without_folds([*clients, unknown], (0,), GUARD, 3)

    for fold, (one, two) in enumerate(zip(decided(costs), decided(other), strict=True)):
        same = [np.array_equal(a.best, b.best) for a, b in zip(one, two, strict=True)]
        assert all(same) if fold == 1 else not any(same)


def test_costs_by_weights_of_each_fold_against_loops():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(2), (3, 2))  # 3 folds, 2 clients
    costs = [[rng.random(6), rng.random(0)] for _ in range(2)]
    arms = [Arm(str(i), of, None) for i, of in enumerate(costs)]  # type: ignore[arg-type]
    found = mix_costs(arms, weights)
    expected = [
        sum(weights[row // 2, 0, arm] * costs[arm][0][row] for arm in range(2))
        for row in range(6)
    ]
    np.testing.assert_allclose(found[0], expected)
    assert found[1].shape == (0,)


def test_an_arm_that_diverged_is_nobodys_choice():
    costs = [np.array([1.0, 2.0]), np.array([3.0])]
    spoiled = [np.array([1.0, np.inf]), np.array([3.0])]
    arms = [Arm("0", costs, None), Arm("1", spoiled, None)]  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="choose: 1 diverged, and cannot be chosen"):
        assert finite_arms(arms, ["0"]) == arms[:1]
    with pytest.raises(ValueError, match="choose: 1 has costs that are not finite"):
        finite_arms(arms, ["1"])


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"alphas": [0.5, 1.5]}, r"alphas: \[0.5, 1.5\] is not in \[0, 1\]"),
        ({"folds": 1}, "folds: 1 is not"),
        ({"folds": 200}, "folds: no client has 200 training rows or more"),
        ({"guard": -1.0}, "guard: -1.0 is not"),
        ({"by": "loss"}, r"by: 'loss' is not measured; it is one of \['mse'\]"),
        (
            {"key": jax.random.split(KEY)},
            "key: 2 keys, but a choice is made for one seed; pass one key",
        ),
        ({"references": ["2"]}, "references: '2' is not one of 0, 0.5, 1"),
        ({"references": []}, "references:"),
        ({"references": "0"}, "^references: '0' is not a list of names$"),
        ({"key": 3.0}, "^key: float is not a key of JAX or a seed; write"),
        ({"build": {}}, "^build: {} is not a mapping with an algorithm or more$"),
        (
            {"measure": {"auc": fb.metrics.auc(lambda p, x: x @ p)}},
            "by: 'auc' is not a mean over rows",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(changed, word):
    with pytest.raises(ValueError, match=word):
        choose(**{"rounds": 0, **changed})
