# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rates and factors of methods with local steps: by hand, by games, what is refused."""

import math

import numpy as np
import pytest

from fedblend.theory import local_training as theory
from fedblend.theory.constants import Smoothness, mixture

TWO = Smoothness(np.array([4.0, 1.0]), np.array([1.0, 0.04]), True)
"""kappa_i is 4 and 25."""


def test_by_hand():
    found = theory.scafflix(np.array([0.5, 1.0]), TWO)
    np.testing.assert_array_equal(found.rates, [1 / 4, 1])
    assert found.steps == 5 and found.p == 1 / 5
    assert found.factor == 1 - theory.round_contraction(1 / 5, 1 / 5, 1 - 0.96**2)
    # alpha = 0 leaves the first client alone, whatever its constants are
    alone = theory.scafflix(np.array([1.0, 0.0]), TWO)
    assert alone.steps == 2
    known = mixture(1.0, TWO, np.array([[0.0], [2.0]]))
    # V = 0.8 * 0.2 * 4, L = 2.5, mu = 0.52, sum a_i = 5, n L V/(p^2 5) = 25 V
    chosen = theory.scafflix(1.0, TWO)
    curve = theory.scafflix_bound(chosen, known)
    assert curve.start == pytest.approx(1.25 * 0.64 * (2.5 / 0.52 + 25))
    assert curve.at_start == pytest.approx(1.25 * 0.64)
    assert curve.rounds_to(1.0) == 0
    rounds = curve.rounds_to(1e-6)
    assert rounds is not None
    assert curve.value(rounds) <= 1e-6 < curve.value(rounds - 1)


def test_locodl_by_hand():
    same = TWO._replace(smooth=np.full(2, 8.0), convex=np.full(2, 0.5))
    found = theory.locodl(1.0, same, 3.0)
    assert found.moved == 0.25
    assert found.rates[0] == 2 / (7.75 + 0.25)
    assert found.dual == pytest.approx(1 / (1 + 3 / 2) / 7)
    shared = theory.locodl(1.0, same, 3.0, masks="one")
    assert shared.dual == pytest.approx(1 / 4 / 4)
    # without compression it is Scaffnew's price, p^2
    assert theory.locodl(1.0, same, 0.0).dual == 1


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize("dual", [1.0, 0.04])
def test_the_factor_of_a_round_is_above_the_exact_one(steps, dual):
    """In one dimension all is known: u moves to g u + P v, and stops with p.

    The expected form at the stop is that of the proof, |u|^2 - 2 s u v + |v|^2 with
    s = P/p, and its largest value on the circle an eigenvalue; g = sqrt(1 - c).
    """
    p, s = 1 / steps, math.sqrt(dual)
    for c in (0.5, 2 * (p * s) ** 2, 0.01):
        if c >= 1:
            continue
        g, P = math.sqrt(1 - c), p * s
        form, u, left = np.zeros((2, 2)), np.array([1.0, 0.0]), 1.0
        for _ in range(4000):
            u = g * u + np.array([0.0, P])
            at_stop = np.outer(u, u) - s * (np.outer(u, [0, 1]) + np.outer([0, 1], u))
            form += left * p * (at_stop + np.diag([0.0, 1.0]))
            left *= 1 - p
        exact = np.linalg.eigvalsh(form)[-1]
        factor = 1 - theory.round_contraction(p, P, c)
        assert exact <= factor + 1e-12 < 1
        # within the factor of 2/3 that the text promises
        assert 1 - factor >= 0.6 * min(1 - exact, 1 - (1 - min(c, P**2)) ** steps)


def test_one_step_is_gradient_descent():
    assert theory.round_contraction(1.0, 1.0, 0.3) == pytest.approx(0.3)
    assert theory.scafflix(1.0, TWO, 1).factor == pytest.approx(0.96**2)


def test_what_is_refused():
    flat = TWO._replace(convex=np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="theory needs convexity of every f_i"):
        theory.scafflix(1.0, flat)
    with pytest.raises(ValueError, match="alpha of some client above 0"):
        theory.scafflix(0.0, TWO)
    with pytest.raises(ValueError, match="locodl: theory needs convexity of g above 0"):
        theory.locodl(1.0, TWO, 1.0, moved=0.0)
    with pytest.raises(ValueError, match="omega"):
        theory.locodl(1.0, TWO, -1.0)
    assert theory.Bound(1.0, 1.0, 0.0, 1.0).rounds_to(0.1) is None
