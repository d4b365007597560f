# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Step sizes: by hand on small numbers, what limits they keep, what they refuse."""

import numpy as np
import pytest

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


@pytest.mark.parametrize("alpha", [0.5, ALPHA], ids=["equal", "unequal"])
def test_without_compression_all_are_gradient_descent(alpha):
    plain = steps.dgd(alpha, TWO)
    assert steps.dcgd(alpha, TWO, 0) == plain
    assert steps.diana(alpha, TWO, 0) == plain
    assert steps.diana(alpha, TWO, 0, 0.5) == plain
    assert steps.dcgd_convex(alpha, TWO, 0) == plain / 4


@pytest.mark.parametrize(
    "step",
    [
        lambda alpha: steps.dgd(alpha, TWO),
        lambda alpha: steps.dcgd(alpha, TWO, [3, 1]),
        lambda alpha: steps.diana(alpha, TWO, [3, 1]),
        lambda alpha: steps.diana_convex(alpha, TWO, [3, 1]),
    ],
    ids=["dgd", "dcgd", "diana", "diana_convex"],
)
def test_steps_grow_like_one_over_alpha_squared(step):
    assert step(0.1 * ALPHA) == pytest.approx(100 * step(ALPHA))
    assert step(0.0) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: steps.dgd(1.2, TWO), "alpha: 1.2 is not in"),
        (lambda: steps.dcgd(0.5, FLAT, 1), "dcgd: needs strong convexity"),
        (lambda: steps.diana(0.5, FLAT, 1), "diana: needs strong convexity"),
        (lambda: steps.dcgd(0.5, TWO, None), "omega: None"),
        (lambda: steps.diana(0.5, TWO, None), "omega: None"),
        (lambda: steps.dcgd(0.5, TWO, -1), "omega: -1"),
        (lambda: steps.dcgd(0.5, TWO, np.inf), "omega: inf"),
        (
            lambda: steps.diana(0.5, TWO, 3, 0.3),
            "memory_rate: 0.3 .* client 0",
        ),
        (lambda: steps.diana(0.5, TWO, 3, [0.25, 0]), "memory_rate: 0 .* client 1"),
    ],
)
def test_refusals_are_one_line(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_mixture_knows_the_same_constants(quadratic):
    known = mixture(0.3, quadratic.smoothness, quadratic.personal)
    assert steps.dgd(0.3, quadratic.smoothness) == 1 / known.L_alpha
