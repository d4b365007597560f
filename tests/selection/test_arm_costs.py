# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Shrinkage to the federation, against closed forms, loops, and planted truths."""

import math

import jax
import numpy as np
import pytest

from fedblend.selection import arm_costs
from fedblend.selection.arm_costs import ClientCosts, CostMoments, Posterior

ARMS = 3


def drawn(seed, sizes, spread=0.1, arms=ARMS):
    """Clients whose arms cost about 1, 2, 3, ..., by a factor of their own."""
    rng = np.random.default_rng(seed)
    own = np.exp(spread * rng.standard_normal((len(sizes), arms)))
    truth = np.arange(1, arms + 1) * own
    return truth, [
        ClientCosts(mean * rng.gamma(1.0, 1.0, (n, arms)), max(n, 4), deployed=5 * n)
        for mean, n in zip(truth, sizes, strict=True)
    ]


def test_one_arm_and_equal_clients_is_the_estimator_of_james_and_stein(monkeypatch):
    """The maximum of the likelihood is known: B = variance of the means - S."""
    monkeypatch.setattr(arm_costs, "FREEDOM", 1e12)  # the normal distribution
    monkeypatch.setattr(arm_costs, "PRIOR_COST", 0.0)
    means = np.array([0.0, 1.0, 3.0, 8.0])
    rows = 1 + np.array([-0.5, 0.5, -0.5, 0.5])
    clients = [ClientCosts((np.exp(m) * rows)[:, None], 4, deployed=4) for m in means]
    sampling = (1 / 3) / 4  # the variance of a row, by the number of rows
    between = means.var() - sampling
    found = arm_costs.learn(clients, rounds=300)
    np.testing.assert_allclose(found.between, [[between]], rtol=1e-3)
    shrunk = [arm_costs.posterior(one, found).mean[0] for one in clients]
    keep = 1 - sampling / means.var()
    np.testing.assert_allclose(shrunk, 3 + keep * (means - 3), rtol=1e-3)
    left = arm_costs.posterior(clients[0], found).covariance[0, 0]
    assert left == pytest.approx(sampling * keep, rel=1e-3)


def literal_client(client, federation):
    """The mean, the covariance and the weight of a client, from the equations."""
    level, within, line, between = federation
    costs, trained, _ = client
    prior, rows = np.array([1, math.log(trained)]) @ line, len(costs)
    if not rows:
        return prior, between, 1.0
    means, inverse = [], np.linalg.inv(between)
    for arm in range(ARMS):
        own = (sum(costs.mean(axis=1)) + level) / (rows + 1)
        means.append((sum(costs[:, arm]) + 2 * own) / (rows + 2))
    off = (costs - costs.mean(axis=0)) / means
    scatter = sum(np.outer(r, r) for r in off)
    sampling = (scatter + 3 * within) / (rows - 1 + 3) / rows
    weight = 1.0
    for _ in range(50):
        covariance = np.linalg.inv(weight * inverse + np.linalg.inv(sampling))
        pull = np.linalg.inv(sampling) @ np.log(means) + weight * inverse @ prior
        mean = covariance @ pull
        away = mean - prior
        spread = away @ inverse @ away + np.trace(inverse @ covariance)
        weight = (4 + ARMS) / (4 + spread)
    return mean, covariance, weight


def literal_round(clients, federation):
    """A round with sums over clients, from the equations."""
    found = [literal_client(one, federation) for one in clients]
    x = np.array([[1, math.log(one.trained)] for one in clients])
    y, weights = np.array([of[0] for of in found]), [of[2] for of in found]
    # A client of features (0, 1) and costs 0 is the prior of the slope.
    root = np.sqrt([*weights, 1])[:, None]
    x_more, y_more = np.vstack([x, [0, 1]]), np.vstack([y, np.zeros(ARMS)])
    line = np.linalg.lstsq(root * x_more, root * y_more, rcond=None)[0]
    off = y - x @ line
    spread = sum(
        weight * (np.outer(o, o) + covariance)
        for o, (_, covariance, weight) in zip(off, found, strict=True)
    )
    within = federation.within
    scale = np.trace(np.linalg.inv(within) @ spread) / len(clients) / ARMS
    between = (spread + 3 * scale * within) / (len(clients) + 3)
    return CostMoments(federation.level, within, line, between)


def test_a_round_against_loops():
    _, clients = drawn(0, [3, 40, 0, 9, 1], spread=1.0)
    before = arm_costs.learn(clients, rounds=2)
    expected = literal_round(clients, before)
    found = arm_costs.learn(clients, rounds=3)
    for name in CostMoments._fields:
        np.testing.assert_allclose(
            getattr(found, name),
            getattr(expected, name),
            rtol=1e-3,
            atol=1e-6,
            err_msg=name,
        )


def test_only_means_of_small_matrices_leave_a_client():
    """The shapes know nothing of rows, and the server's half takes the mean alone."""
    _, clients = drawn(1, [2, 300, 0])
    federation = arm_costs.learn(clients, rounds=1)
    for statistics, most in (
        (arm_costs.first_statistics, 1),
        (lambda one: arm_costs.second_statistics(one, 2.0), ARMS**2),
        (lambda one: arm_costs.client_statistics(one, federation), ARMS**2),
    ):
        sent = [jax.tree.map(np.shape, statistics(one)) for one in clients]
        assert sent[0] == sent[1] == sent[2]
        largest = max(math.prod(shape) for shape in sent[0].values())
        assert largest == most
        turned = clients[1]._replace(costs=clients[1].costs[::-1])
        one, other = statistics(clients[1]), statistics(turned)
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-9)
    mean = jax.tree.map(
        lambda *each: sum(each) / 3,
        *(arm_costs.client_statistics(one, federation) for one in clients),
    )
    found = arm_costs.refine(mean, federation, 3)
    again = arm_costs.learn(clients, rounds=2)
    np.testing.assert_allclose(found.between, again.between, rtol=1e-9)


def test_the_truth_is_nearer_than_the_means_are():
    """Its point: less error than each client's own mean, and than one for all."""
    truth, clients = drawn(2, [4] * 40 + [50] * 40, spread=0.3)
    federation = arm_costs.learn(clients)
    found = [arm_costs.fold_posterior(one, federation).mean for one in clients]
    own = [np.log(one.costs.mean(axis=0)) for one in clients]
    one_for_all = np.mean(own, axis=0)
    guesses = (found, own, one_for_all)
    errors = [np.mean((guess - np.log(truth)) ** 2) for guess in guesses]
    assert errors[0] < 0.7 * min(errors[1:])
    spread = np.diag(federation.between)
    np.testing.assert_allclose(spread, 0.09, rtol=0.5)


def test_models_of_all_rows_are_better_by_the_slope():
    belief = CostMoments(1.0, np.eye(1), np.array([[5.0], [-2.0]]), np.eye(1))
    client = ClientCosts(np.zeros((0, 1)), trained=10, deployed=20)
    assert arm_costs.fold_posterior(client, belief).mean == 5 - 2 * math.log(10)
    assert arm_costs.posterior(client, belief).mean == pytest.approx(
        5 - 2 * math.log(20)
    )


def normal_above(at):
    return math.erfc(at / math.sqrt(2)) / 2


def test_the_decision_against_its_closed_form():
    """Of two arms, whose ratio is lognormal: E max(0, c_1 - c_0) is known."""
    gap, deviation = -0.5, 2.0
    belief = Posterior(np.array([1.0, 1.0 + gap]), np.diag([0.0, deviation**2]))
    # What both cost alike is known, so that each has half of the ratio.
    at, half = gap / deviation, deviation / 2
    expected = np.exp(belief.mean + half**2 / 2)
    harm = expected[1] * normal_above(-at - half) - expected[0] * normal_above(
        -at + half
    )
    found = arm_costs.decide(belief, [0], guard=0.0, draws=200_000)
    assert found.harm[0] == 0
    assert found.harm[1] == pytest.approx(harm, rel=0.02)
    assert found.best[1] == pytest.approx(normal_above(at), abs=0.01)
    np.testing.assert_allclose(found.expected, expected, rtol=0.02)
    indifferent = (expected[0] - expected[1]) / harm
    arms = [
        arm_costs.decide(belief, [0], guard=guard, draws=200_000)
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
        ClientCosts((rng.random((n, 3)) < c).astype(float), int(0.8 * n), n)
        for c, n in zip(cost, sizes, strict=True)
    ]


def test_alike_clients_all_get_the_common_arm():
    clients = planted(0, [0.20, 0.10, 0.25])
    federation = arm_costs.learn(clients)
    own = [int(one.costs.mean(axis=0).argmin()) for one in clients]
    assert len(set(own)) > 1  # their rows alone disagree
    for one in clients:
        belief = arm_costs.posterior(one, federation)
        assert arm_costs.decide(belief, [0, 2], guard=1.0).arm == 1


def test_a_client_that_mixing_hurts_falls_back():
    clients = planted(0, [0.05, 0.30, 0.5])
    federation = arm_costs.learn(clients)
    found = [
        arm_costs.decide(arm_costs.posterior(one, federation), [0, 2], guard=1.0).arm
        for one in clients
    ]
    assert found[-1] == 0
    assert np.mean(np.array(found[:-1]) == 1) >= 0.9


def test_costs_that_never_differ_leave_the_last_arm():
    clients = [ClientCosts(np.zeros((5, 2)), 4, 5)] * 3
    federation = arm_costs.learn(clients)
    belief = arm_costs.posterior(clients[0], federation)
    found = arm_costs.decide(belief, [0], guard=0.5)
    assert (found.expected < 1e-6).all()
    assert found.harm.max() < 1e-6


def noisy(seed, scale):
    """Skewed costs of clients whose noise differs; ``scale`` is that of its logarithm.

    The arms of a row have one large error in common, as squared errors of a regression.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(10, 80, 40)
    level = np.exp(scale * rng.standard_normal((40, 1)))
    truth = level * np.exp([0.0, -0.1, 0.3] + 0.3 * rng.standard_normal((40, ARMS)))
    clients = []
    for mean, n in zip(truth, sizes, strict=True):
        factor = rng.gamma(0.5, 2.0, (n, 1)) * rng.gamma(4.0, 0.25, (n, ARMS))
        clients.append(ClientCosts(mean * factor, int(n - n // 5), int(n)))
    return truth, clients


def beliefs(clients):
    federation = arm_costs.learn(clients)
    return [
        arm_costs.decide(arm_costs.posterior(one, federation), [0, 2], guard=0.5)
        for one in clients
    ]


def test_stated_harm_is_that_of_clients_with_other_noise():
    """Of quiet clients and of loud ones, each in its own unit."""
    stated, real = np.zeros(2), np.zeros(2)
    for seed in range(3):
        truth, clients = noisy(seed, 1.0)
        least = truth[:, [0, 2]].min(axis=1)
        harms = np.maximum(truth[:, 1] - least, 0) / least
        believed = np.array([one.harm[1] for one in beliefs(clients)]) / least
        loud = least > np.median(least)
        real += harms[loud].mean(), harms[~loud].mean()
        stated += believed[loud].mean(), believed[~loud].mean()
    np.testing.assert_allclose(stated, real, rtol=0.25)


def test_the_unit_of_a_clients_costs_does_not_matter():
    _, clients = noisy(0, 0.0)
    louder = [one._replace(costs=one.costs * 50.0 ** (i % 2)) for i, one in
              enumerate(clients)]  # fmt: skip
    one, other = ([of.best for of in beliefs(each)] for each in (clients, louder))
    assert np.abs(np.subtract(one, other)).mean() < 0.05


def test_a_client_unlike_all_others_is_not_pulled_to_them():
    """Student's distribution: a hundred times the costs is no mean of a crowd."""
    _, clients = drawn(3, [30] * 30, spread=0.05)
    odd = clients[0]._replace(costs=clients[0].costs * [1.0, 1.0, 100.0])
    federation = arm_costs.learn([odd, *clients[1:]])
    found = arm_costs.fold_posterior(odd, federation)
    assert found.weight < 0.2
    assert arm_costs.fold_posterior(clients[1], federation).weight > 0.7
