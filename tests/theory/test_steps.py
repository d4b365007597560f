# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Step sizes: by hand on small numbers, what limits they keep, what they refuse."""

import math

import numpy as np
import pytest
from flix_by_hand import Case, Quadratic, dcgd, diana, mixed

from fedblend.theory import steps
from fedblend.theory.constants import Smoothness, mixture

TWO = Smoothness(np.array([4.0, 1.0]), np.array([1.0, 0.5]), True)
"""Two clients: with alpha = (1/2, 1) both l_i are 1, so L_alpha = 1."""

ALPHA = np.array([0.5, 1.0])
FLAT = TWO._replace(convex=np.zeros(2))


def test_by_hand():
    omega, b = np.array([3.0, 1.0]), np.array([0.2, 0.4])
    assert steps.dgd(ALPHA, TWO) == 1
    assert steps.dgd(0.5, TWO) == pytest.approx(1 / (0.25 * 2.5))
    assert steps.dcgd(ALPHA, TWO, omega) == pytest.approx(1 / (1 + 3))
    assert steps.dcgd_convex(ALPHA, FLAT, omega) == pytest.approx(1 / 16)
    # b defaults to (1/4, 1/2): 4 max(3/4, 1/2)/(2/4) = 6
    assert steps.diana_convex(ALPHA, FLAT, omega) == pytest.approx(1 / 40)
    assert steps.diana_convex(ALPHA, FLAT, omega, b) == pytest.approx(1 / 40)
    # strongly convex by next to nothing: q = 4/(1 + c)^2 with c = 1 - b (1 + omega)
    stiff = TWO._replace(convex=np.full(2, 1e-9))
    assert steps.diana(ALPHA, stiff, omega) == pytest.approx(1 / (1 + 4 * 3 / 2))
    slow = 3 * 4 / 1.6**2 / 2
    assert steps.diana(ALPHA, stiff, omega, 0.1) == pytest.approx(1 / (1 + slow))


def test_nonconvex_by_hand():
    assert steps.dcgd_nonconvex(ALPHA, FLAT, 2.0, 1) == pytest.approx(math.sqrt(1 / 2))
    assert steps.dcgd_nonconvex(ALPHA, FLAT, 0.1, 1) == 1
    e = 2 * 1 * 5 / 2
    expected = min(1 / (2 * math.sqrt(e)), 2 / (math.sqrt(1 + 8 * e) + 1))
    assert steps.diana_nonconvex(ALPHA, FLAT, 1.0) == pytest.approx(expected)
    stiff = Smoothness(np.array([7.0, 1.0]), np.zeros(2), True)
    assert steps.diana_nonconvex(1.0, stiff, 1.0) == pytest.approx(expected / 5)


@pytest.mark.parametrize("alpha", [0.5, ALPHA], ids=["equal", "unequal"])
def test_without_compression_all_are_gradient_descent(alpha):
    plain = steps.dgd(alpha, TWO)
    assert steps.dcgd(alpha, TWO, 0) == plain
    assert steps.diana(alpha, TWO, 0) == plain
    assert steps.diana(alpha, TWO, 0, 0.5) == plain
    assert steps.dcgd_nonconvex(alpha, TWO, 0, 100) == plain
    assert steps.diana_nonconvex(alpha, TWO, 0) == plain
    assert steps.dcgd_convex(alpha, TWO, 0) == plain / 4


@pytest.mark.parametrize(
    "step",
    [
        lambda alpha: steps.dgd(alpha, TWO),
        lambda alpha: steps.dcgd(alpha, TWO, [3, 1]),
        lambda alpha: steps.diana(alpha, TWO, [3, 1]),
        lambda alpha: steps.diana_convex(alpha, TWO, [3, 1]),
        lambda alpha: steps.diana_nonconvex(alpha, TWO, [3, 1]),
        lambda alpha: steps.dcgd_nonconvex(alpha, TWO, 3, 50),
    ],
    ids=["dgd", "dcgd", "diana", "diana_convex", "diana_nonconvex", "dcgd_nonconvex"],
)
def test_steps_grow_like_one_over_alpha_squared(step):
    assert step(0.1 * ALPHA) == pytest.approx(100 * step(ALPHA))
    assert step(0.0) == 0


def test_memory_range_contains_the_usual_rate():
    for omega in (0.01, 0.5, 1.0, 9.0, 200.0):
        low, high = steps.memory_range(omega)
        assert low == 1 / (1 + omega)
        assert low < high <= 1.5 * low
        for rate in (low, high):  # theta >= 1/(2 (1 + omega)), as the proof needs
            r = 2 * (1 + omega)
            theta = 2 * rate - (1 - rate) / r - rate**2 * (1 + omega)
            assert min(1 - rate**2 * omega, theta) >= (1 - 1e-12) / (2 * (1 + omega))
        steps.diana_nonconvex(1.0, TWO, omega, high)


def test_one_stiff_client_needs_the_root_mean_square():
    """999 flat clients and a stiff one: at the paper's step DIANA diverges."""
    n, dim, k = 1000, 10, 1
    stiff = np.zeros((n, dim, dim))
    stiff[0] = np.eye(dim)
    clients = [Quadratic(A, np.zeros(dim)) for A in stiff]
    smoothness = Smoothness(np.eye(n)[0], np.zeros(n), True)
    case = Case(None, clients, np.zeros((n, dim)), smoothness)  # pyright: ignore
    f, omega, x = mixed(case, 1.0), dim / k - 1, np.ones(dim)
    ours = steps.diana_nonconvex(1.0, smoothness, omega)
    theirs = ours * math.sqrt(np.mean(smoothness.smooth**2)) * n
    assert theirs == pytest.approx(math.sqrt(n) * ours)
    ends = []
    for step in (ours, theirs):
        rng = np.random.default_rng(0)
        run = diana(f, x, step, 100, k, 1 / (1 + omega), rng, "gradient")
        ends.append(np.linalg.norm(run[-1][0]))
    assert ends[0] < np.linalg.norm(x)
    assert ends[1] > 10 * np.linalg.norm(x)


def test_the_horizon_keeps_dcgd_from_exploding():
    n, dim, k, rounds = 2, 30, 1, 2000
    case = Case(
        None,  # pyright: ignore
        [Quadratic(np.eye(dim), np.full(dim, sign)) for sign in (1.0, -1.0)],
        np.zeros((n, dim)),
        Smoothness(np.ones(n), np.zeros(n), True),
    )
    f = mixed(case, 1.0)
    ours = steps.dcgd_nonconvex(1.0, case.smoothness, dim / k - 1, rounds)
    calm, wild = (
        dcgd(f, np.ones(dim), step, 200, k, np.random.default_rng(0))[-1]
        for step in (ours, steps.dgd(1.0, case.smoothness))
    )
    assert np.linalg.norm(calm) < 10
    assert np.linalg.norm(wild) > 1e10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: steps.dgd(1.2, TWO), "alpha: 1.2 is not in"),
        (lambda: steps.dcgd(0.5, FLAT, 1), "dcgd: needs strong convexity"),
        (lambda: steps.diana(0.5, FLAT, 1), "diana: needs strong convexity"),
        (lambda: steps.dcgd(0.5, TWO, None), "omega: None"),
        (lambda: steps.diana(0.5, TWO, None), "omega: None"),
        (lambda: steps.diana_nonconvex(0.5, TWO, None), "omega: None"),
        (lambda: steps.dcgd(0.5, TWO, -1), "omega: -1"),
        (lambda: steps.dcgd(0.5, TWO, np.inf), "omega: inf"),
        (
            lambda: steps.diana(0.5, TWO, 3, 0.3),
            "memory_rate: 0.3 .* client 0",
        ),
        (lambda: steps.diana(0.5, TWO, 3, [0.25, 0]), "memory_rate: 0 .* client 1"),
        (lambda: steps.diana_nonconvex(0.5, TWO, 3, 0.1), "memory_rate: 0.1"),
        (lambda: steps.diana_nonconvex(0.5, TWO, 3, [0.25, 0.26]), "one number"),
        (lambda: steps.dcgd_nonconvex(0.5, TWO, 3, 0), "horizon: 0"),
    ],
)
def test_refusals_are_one_line(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_mixture_knows_the_same_constants(quadratic):
    known = mixture(0.3, quadratic.smoothness, quadratic.personal)
    assert steps.dgd(0.3, quadratic.smoothness) == 1 / known.L_alpha
