# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Shrinkage to the federation, against closed forms, loops, and planted truths."""

import math

import jax
import numpy as np
import pytest

from fedblend.simulation import shrinkage
from fedblend.simulation.shrinkage import Federation, Posterior, Scores

ARMS = 3


def drawn(seed, sizes, spread=0.1, arms=ARMS):
    """Clients whose arms cost 1, 2, 3, ... on average, and a number of their own."""
    rng = np.random.default_rng(seed)
    truth = np.arange(1, arms + 1) + spread * rng.standard_normal((len(sizes), arms))
    return truth, [
        Scores(mean + rng.standard_normal((n, arms)), trained=max(n, 4), deployed=5 * n)
        for mean, n in zip(truth, sizes, strict=True)
    ]


def test_one_arm_and_equal_clients_is_the_estimator_of_james_and_stein():
    """The maximum of the likelihood is known: B = variance of the means - S."""
    means = np.array([0.0, 1.0, 3.0, 8.0])
    rows = np.array([-1.0, 1.0, -1.0, 1.0])
    clients = [Scores((m + rows)[:, None], trained=4, deployed=4) for m in means]
    sampling = (4 / 3) / 4  # the variance of a row, by the number of rows
    between = means.var() - sampling
    found = shrinkage.learn(clients, rounds=300)
    np.testing.assert_allclose(found.between, [[between]], rtol=1e-3)
    shrunk = [shrinkage.posterior(one, found).mean[0] for one in clients]
    keep = 1 - sampling / means.var()
    np.testing.assert_allclose(shrunk, 3 + keep * (means - 3), rtol=1e-3)
    left = shrinkage.posterior(clients[0], found).covariance[0, 0]
    assert left == pytest.approx(sampling * keep, rel=1e-3)


def literal_round(clients, federation):
    """A round with sums over clients, from the equations."""
    within, line, between = federation
    means, covariances, features = [], [], []
    for costs, trained, _ in clients:
        x = np.array([1, math.log(trained)])
        prior, rows = x @ line, len(costs)
        if rows:
            scatter = sum(np.outer(r, r) for r in costs - costs.mean(axis=0))
            sampling = (scatter + 30 * within) / (rows - 1 + 30) / rows
            precision = np.linalg.inv(between) + np.linalg.inv(sampling)
            covariance = np.linalg.inv(precision)
            pull = np.linalg.inv(sampling) @ costs.mean(axis=0)
            mean = covariance @ (pull + np.linalg.inv(between) @ prior)
        else:
            mean, covariance = prior, between
        means.append(mean)
        covariances.append(covariance)
        features.append(x)
    x, y = np.array(features), np.array(means)
    # A client of features (0, 1) and costs 0 is the prior of the slope.
    x_more, y_more = np.vstack([x, [0, 1]]), np.vstack([y, np.zeros(ARMS)])
    line = np.linalg.lstsq(x_more, y_more, rcond=None)[0]
    off = y - x @ line
    spread = sum(np.outer(o, o) + c for o, c in zip(off, covariances, strict=True))
    scale = np.trace(np.linalg.inv(within) @ spread) / len(clients) / ARMS
    return Federation(within, line, (spread + 3 * scale * within) / (len(clients) + 3))


def test_a_round_against_loops():
    _, clients = drawn(0, [3, 40, 0, 9, 1], spread=1.0)
    before = shrinkage.learn(clients, rounds=2)
    expected = literal_round(clients, before)
    found = shrinkage.learn(clients, rounds=3)
    for name in Federation._fields:
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=1e-6, err_msg=name
        )


def test_only_means_of_small_matrices_leave_a_client():
    """The shapes know nothing of rows, and the server's half takes the mean alone."""
    _, clients = drawn(1, [2, 300, 0])
    federation = shrinkage.learn(clients, rounds=1)
    for statistics in (
        shrinkage.first_statistics,
        lambda one: shrinkage.client_statistics(one, federation),
    ):
        sent = [jax.tree.map(np.shape, statistics(one)) for one in clients]
        assert sent[0] == sent[1] == sent[2]
        largest = max(math.prod(shape) for shape in sent[0].values())
        assert largest == ARMS**2
        turned = clients[1]._replace(costs=clients[1].costs[::-1])
        one, other = statistics(clients[1]), statistics(turned)
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-9)
    mean = jax.tree.map(
        lambda *each: sum(each) / 3,
        *(shrinkage.client_statistics(one, federation) for one in clients),
    )
    found = shrinkage.refine(mean, federation, 3)
    again = shrinkage.learn(clients, rounds=2)
    np.testing.assert_allclose(found.between, again.between, rtol=1e-9)


def test_the_truth_is_nearer_than_the_means_are():
    """Its point: less error than each client's own mean, and than one for all."""
    truth, clients = drawn(2, [4] * 40 + [50] * 40, spread=0.3)
    federation = shrinkage.learn(clients)
    found = [shrinkage.fold_posterior(one, federation).mean for one in clients]
    own = [one.costs.mean(axis=0) for one in clients]
    one_for_all = np.mean(own, axis=0)
    errors = [np.mean((guess - truth) ** 2) for guess in (found, own, one_for_all)]
    assert errors[0] < 0.7 * min(errors[1:])
    spread = np.diag(federation.between)
    np.testing.assert_allclose(spread, 0.09, rtol=0.5)


def test_models_of_all_rows_are_better_by_the_slope():
    belief = Federation(np.eye(1), np.array([[5.0], [-2.0]]), np.eye(1))
    client = Scores(np.zeros((0, 1)), trained=10, deployed=20)
    assert shrinkage.fold_posterior(client, belief).mean == 5 - 2 * math.log(10)
    assert shrinkage.posterior(client, belief).mean == pytest.approx(
        5 - 2 * math.log(20)
    )


def test_the_decision_against_its_closed_form():
    """A reference of known cost: E max(0, u) of a normal number is known."""
    gap, deviation = -0.5, 2.0
    belief = Posterior(np.array([1.0, 1.0 + gap]), np.diag([0.0, deviation**2]))
    at = gap / deviation
    density = math.exp(-(at**2) / 2) / math.sqrt(2 * math.pi)
    harm = deviation * density + gap * math.erfc(-at / math.sqrt(2)) / 2
    found = shrinkage.decide(belief, [0], guard=0.0, draws=200_000)
    assert found.harm[0] == 0
    assert found.harm[1] == pytest.approx(harm, rel=0.02)
    assert found.best[1] == pytest.approx(math.erfc(at / math.sqrt(2)) / 2, abs=0.01)
    indifferent = -gap / harm
    arms = [
        shrinkage.decide(belief, [0], guard=guard, draws=200_000)
        for guard in (0.95 * indifferent, 1.05 * indifferent)
    ]
    assert [one.arm for one in arms] == [1, 0]
    assert [one.unguarded for one in arms] == [1, 1]


def planted(seed, odd):
    """Arm 1 is best for all clients but the odd one, for which arm 0 is."""
    rng = np.random.default_rng(seed)
    cost = np.array([[0.20, 0.10, 0.25]] * 20 + [odd])
    sizes = [30] * 20 + [800]
    return [
        Scores((rng.random((n, 3)) < c).astype(float), int(0.8 * n), n)
        for c, n in zip(cost, sizes, strict=True)
    ]


def test_alike_clients_all_get_the_common_arm():
    clients = planted(0, [0.20, 0.10, 0.25])
    federation = shrinkage.learn(clients)
    own = [int(one.costs.mean(axis=0).argmin()) for one in clients]
    assert len(set(own)) > 1  # their rows alone disagree
    for one in clients:
        belief = shrinkage.posterior(one, federation)
        assert shrinkage.decide(belief, [0, 2], guard=1.0).arm == 1


def test_a_client_that_mixing_hurts_falls_back():
    clients = planted(0, [0.05, 0.30, 0.5])
    federation = shrinkage.learn(clients)
    found = [
        shrinkage.decide(shrinkage.posterior(one, federation), [0, 2], guard=1.0).arm
        for one in clients
    ]
    assert found[-1] == 0
    assert np.mean(np.array(found[:-1]) == 1) >= 0.9


def test_costs_that_never_differ_leave_the_last_arm():
    clients = [Scores(np.zeros((5, 2)), 4, 5)] * 3
    federation = shrinkage.learn(clients)
    belief = shrinkage.posterior(clients[0], federation)
    assert np.isfinite(belief.mean).all()
    assert abs(belief.mean).max() < 1e-6
