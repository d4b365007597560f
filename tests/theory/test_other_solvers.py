# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Accelerated descent, EF21, EF21-P and perm-k: rates hold, and steps are not timid.

Runs are written out in NumPy; where a round is a linear map, its spectrum decides.
"""

import itertools
import math

import numpy as np
import pytest

from fedblend.theory import bounds, steps
from fedblend.theory.constants import Smoothness
from fedblend_reproductions.flix import theory as paper
from flix_by_hand import UNEQUAL, known_of, mixed

ROUNDING = 1e-12


def top_k(vector, k):
    kept = np.zeros_like(vector)
    for place in np.argsort(-abs(vector))[:k]:
        kept[place] = vector[place]
    return kept


def accelerate(f, x, rate, momentum, rounds):
    """All y of Nesterov's method, the first one included."""
    y, points = x, [x]
    for _ in range(rounds):
        after = y - rate * f.gradient(y)
        y = after + momentum * (after - x)
        x = after
        points.append(y)
    return points


def ef21(f, x, rate, rounds, k):
    estimates, points = np.zeros_like(f.gradients(x)), [x]
    for _ in range(rounds):
        for i, own in enumerate(f.gradients(x)):
            estimates[i] = estimates[i] + top_k(own - estimates[i], k)
        x = x - rate * estimates.mean(axis=0)
        points.append(x)
    return points


def gaps_of(f, points):
    least = f.solve()[1]
    return np.array([f.value(x) - least for x in points])


OF_HALF = {
    "accelerated": bounds.accelerated,
    "ef21": lambda known: bounds.ef21(known, 0.5),
}
"""Bounds with compressors that contract by a half."""


@pytest.mark.parametrize("alpha", [0.3, UNEQUAL], ids=["equal", "unequal"])
def test_every_round_is_below_its_bound(quadratic, alpha):
    known, f = known_of(quadratic, alpha), mixed(quadratic, alpha)
    start, rounds, k, delta = known.average, 250, 2, 0.5
    own = steps.accelerated(alpha, quadratic.smoothness)
    runs = {
        "accelerated": accelerate(f, start, *own, rounds),
        "ef21": ef21(
            f, start, steps.ef21(alpha, quadratic.smoothness, delta), rounds, k
        ),
    }
    for name, points in runs.items():
        gaps = gaps_of(f, points)
        promise = OF_HALF[name](known).value(np.arange(rounds + 1))
        assert (gaps <= promise + ROUNDING).all(), name
        assert gaps[-1] < 1e-4 * gaps[0], name
        assert promise[-1] < 0.01 * promise[1], name
    plain = bounds.dgd(known)
    assert bounds.accelerated(known).factor == pytest.approx(
        1 - math.sqrt(1 - plain.factor)
    )


@pytest.mark.parametrize("kappa", [2.0, 30.0, 1000.0])
@pytest.mark.parametrize("delta", [0.1, 0.5, 0.9])
def test_error_feedback_contracts_as_promised_and_twice_the_step_diverges(delta, kappa):
    """One client, one dimension, and the two linear maps that contract by delta."""
    known = Smoothness(np.ones(1), np.array([1 / kappa]), True)
    step = steps.ef21(1.0, known, delta)
    assert step == steps.downlink(1.0, known, delta)
    theta, _ = steps.contraction(delta)

    def worst(step):
        """Of (x, g) -> (x - step g, g + C(c x - g)); EF21-P has the same spectrum."""
        found = []
        for scale, curve in itertools.product((theta, 2 - theta), (1.0, 1 / kappa)):
            after = [1, -step], [scale * curve, 1 - scale - scale * curve * step]
            found.append(max(abs(np.linalg.eigvals(np.array(after)))) ** 2)
        return max(found)

    assert worst(step) <= 1 - step / kappa + ROUNDING
    assert worst(2 * step) > 1


@pytest.mark.parametrize("delta", [0.05, 0.6])
def test_the_step_of_ef21_is_longer_than_in_the_paper(quadratic, delta):
    known = quadratic.smoothness
    parts, mu = known.smooth, known.convex.mean()
    smooth, spread = parts.mean(), math.sqrt((parts**2).mean())
    theta, beta = steps.contraction(delta)
    theorem_1 = 1 / (smooth + spread * math.sqrt(beta / theta))
    theorem_2 = min(
        1 / (smooth + spread * math.sqrt(2 * beta / theta)), theta / (2 * mu)
    )
    flat = known._replace(convex=np.zeros(6))
    nonconvex, ours = steps.ef21(1.0, flat, delta), steps.ef21(1.0, known, delta)
    assert theorem_1 < nonconvex < 1.3 * theorem_1
    assert theorem_2 < ours <= nonconvex
    slack = (1 - ours * smooth) * (theta - ours * mu) - beta * (spread * ours) ** 2
    assert slack == pytest.approx(0, abs=1e-12)


def test_four_thirds_of_the_step_is_the_limit_of_acceleration():
    known = Smoothness(np.ones(1), np.array([1e-4]), True)
    rate, momentum = steps.accelerated(1.0, known)

    def worst(rate):
        found = []
        for curve in (1.0, 1e-4):
            down = 1 - rate * curve
            after = [(1 + momentum) * down, -momentum * down], [1, 0]
            found.append(max(abs(np.linalg.eigvals(np.array(after)))))
        return max(found)

    assert worst(rate) == pytest.approx(1 - 1e-2, abs=1e-4)
    assert worst(1.4 * rate) > 1


def permuted_maps(matrices, step):
    """Every outcome of a round of perm-k over x - x*, where all g_i* are zero."""
    n = len(matrices)
    for order in itertools.permutations(range(n)):
        sent = np.stack([matrices[i][place] for place, i in enumerate(order)])
        yield np.eye(n) - step * sent


def test_perm_k_contracts_as_promised_and_four_times_the_step_does_not(quadratic):
    matrices = [client.A[:3, :3] for client in quadratic.clients[:3]]
    values = np.array([np.linalg.eigvalsh(A)[[0, -1]] for A in matrices])
    known = Smoothness(values[:, 1], values[:, 0], True)
    step = steps.perm_k(1.0, known)
    assert step == pytest.approx(1 / (2 * values[:, 1].max()))
    maps = list(permuted_maps(matrices, step))
    after = np.mean([m.T @ m for m in maps], axis=0)
    assert np.linalg.eigvalsh(after)[-1] <= 1 - step * values[:, 0].mean()
    # One client with all the curvature: E |x+|^2 = (1 - 2 step/n + step^2/n) |x|^2.
    lonely = [np.eye(3), np.zeros((3, 3)), np.zeros((3, 3))]
    for times, stays in ((1, True), (3.9, True), (4.1, False)):
        maps = list(permuted_maps(lonely, times / 2))
        grown = np.linalg.eigvalsh(np.mean([m.T @ m for m in maps], axis=0))[-1]
        assert (grown < 1) == stays


BOUNDS = {
    "accelerated": bounds.accelerated,
    "ef21": lambda known: bounds.ef21(known, 0.4),
    "downlink": lambda known: paper.downlink(known, 0.4),
    "perm_k": paper.perm_k,
}


@pytest.mark.parametrize("name", ["accelerated", "ef21", "downlink", "perm_k"])
def test_steps_and_bounds_follow_alpha(quadratic, name):
    known, delta = quadratic.smoothness, 0.4
    step = {
        "accelerated": lambda alpha: steps.accelerated(alpha, known).rate,
        "ef21": lambda alpha: steps.ef21(alpha, known, delta),
        "downlink": lambda alpha: steps.downlink(alpha, known, delta),
        "perm_k": lambda alpha: steps.perm_k(alpha, known),
    }[name]
    assert step(0.1 * UNEQUAL) == pytest.approx(100 * step(UNEQUAL))
    assert step(0.0) == 0
    bound = BOUNDS[name]
    half, one = (bound(known_of(quadratic, alpha)) for alpha in (0.5, 1.0))
    assert half.factor == one.factor
    assert (bound(known_of(quadratic, 0.0)).value(np.arange(4)) == 0).all()


def test_without_compression_error_feedback_is_gradient_descent(quadratic):
    known = known_of(quadratic, 0.5)
    for name, bound in (("ef21", bounds.ef21), ("downlink", paper.downlink)):
        assert bound(known, 1.0) == bounds.dgd(known)
        assert getattr(steps, name)(0.5, known.smoothness, 1.0) == pytest.approx(
            steps.dgd(0.5, known.smoothness)
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: steps.ef21(0.5, s, None), "delta: None"),
        (lambda s: steps.ef21(0.5, s, 0), "delta: 0"),
        (lambda s: steps.ef21(0.5, s, [0.5, 0.0, 1, 1, 1, 1]), "delta: 0"),
        (lambda s: steps.downlink(0.5, s, 1.5), "delta: 1.5"),
        (
            lambda s: steps.accelerated(0.5, s._replace(convex=np.zeros(6))),
            "accelerated: needs strong convexity",
        ),
        (
            lambda s: steps.perm_k(0.5, s._replace(convex=np.zeros(6))),
            "perm_k: needs strong convexity",
        ),
    ],
)
def test_refusals_are_one_line(quadratic, call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call(quadratic.smoothness)
    assert "\n" not in str(raised.value)
