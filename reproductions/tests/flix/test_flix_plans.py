# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The paper's plans keep their promise when run, and both directions are inverse."""

import math

import numpy as np
import pytest

from fedblend.theory import steps
from fedblend_reproductions.flix.theory import Plan, largest_alpha, rounds_needed
from flix_by_hand import descend, diana, known_of, mixed, quadratic_case

EPS = 1e-3
OMEGAS = pytest.mark.parametrize("omega", [0.0, 1.0], ids=["dgd", "diana"])


def check_run(case, made: Plan):
    """Gradient descent for the planned rounds reaches the accuracy of the plan."""
    assert made.rounds is not None
    known, f = known_of(case, made.alpha), mixed(case, made.alpha)
    step = steps.dgd(made.alpha, case.smoothness)
    last = descend(f, known.average, step, max(made.rounds - 1, 0))[-1]
    assert f.value(last) - f.solve()[1] <= made.eps * (1 + 2e-9)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.4, 1.0])
def test_the_promise_holds_when_run(quadratic, alpha):
    made = rounds_needed(alpha, EPS, quadratic.smoothness, quadratic.personal)
    check_run(quadratic, made)


@pytest.mark.parametrize(("name", "n"), [("ijcnn1", 8), ("a6a", 20), ("mushrooms", 20)])
@pytest.mark.parametrize("rounds", [1, 4, 12])
def test_the_promise_holds_on_real_data(real, name, n, rounds):
    case = real(name, n)
    made = largest_alpha(rounds, 3e-3, case.smoothness, case.personal)
    assert 0 < made.alpha <= 1
    check_run(case, made)


def test_the_promise_of_diana_holds_on_average(quadratic):
    made = rounds_needed(0.5, EPS, quadratic.smoothness, quadratic.personal, 1.0)
    assert made.rounds is not None
    known, f = known_of(quadratic, 0.5), mixed(quadratic, 0.5)
    step = steps.diana(0.5, quadratic.smoothness, 1.0)
    ends = [
        diana(f, known.average, step, made.rounds - 1, 2, 0.5, rng)[-1][0]
        for rng in map(np.random.default_rng, range(20))
    ]
    assert np.mean([f.value(x) for x in ends]) - f.solve()[1] <= EPS


def test_the_papers_formula_for_equal_alpha(quadratic):
    known = known_of(quadratic, 1.0)
    smooth, convex = (of.mean() for of in quadratic.smoothness[:2])
    A = math.sqrt(2 * EPS / (smooth * known.V))
    q = 1 / math.sqrt(1 - convex / smooth)
    arguments = (EPS, quadratic.smoothness, quadratic.personal)
    for rounds in range(1, 12):
        made = largest_alpha(rounds, *arguments)
        assert made.alpha == pytest.approx(min(1, A * q ** (rounds - 1)), rel=1e-9)
    for k in (1, 2, 3):
        inside = A * q ** (k - 0.5)
        assert rounds_needed(inside, *arguments).rounds == k + 1
    assert rounds_needed(A / 2, *arguments).rounds == 1


@OMEGAS
def test_the_directions_are_inverse_and_monotone(quadratic, omega):
    arguments = (EPS, quadratic.smoothness, quadratic.personal)
    alphas = []
    for rounds in (1, 2, 3, 5, 8, 13, 30, 80, 200):
        most = largest_alpha(rounds, *arguments, omega)
        assert most.rounds is not None and most.rounds <= rounds
        alphas.append(most.alpha)
        if most.alpha < 1:
            more = rounds_needed(min(1, most.alpha * (1 + 1e-6)), *arguments, omega)
            assert more.rounds is None or more.rounds > rounds
    assert (np.diff(alphas) >= 0).all()
    needed = []
    for alpha in np.linspace(0, 1, 41):
        made = rounds_needed(alpha, *arguments, omega)
        assert made.rounds is not None
        needed.append(made.rounds)
        back = largest_alpha(made.rounds, *arguments, omega)
        assert back.alpha >= alpha * (1 - 1e-9)
    assert needed[0] == 0 and len(set(needed)) > 3
    assert (np.diff(needed) >= 0).all()


@OMEGAS
def test_equal_models_need_one_round(quadratic, omega):
    same = np.ones((6, 4))
    assert rounds_needed(1.0, EPS, quadratic.smoothness, same, omega).rounds == 1
    assert largest_alpha(1, EPS, quadratic.smoothness, same, omega).alpha == 1


def test_without_strong_convexity_nothing_beyond_one_shot(quadratic):
    flat = quadratic.smoothness._replace(convex=np.zeros(6))
    one = largest_alpha(1, EPS, flat, quadratic.personal)
    many = largest_alpha(1000, EPS, flat, quadratic.personal)
    assert 0 < one.alpha == many.alpha < 1
    assert many.rounds == 1
    beyond = rounds_needed(2 * one.alpha, EPS, flat, quadratic.personal)
    assert beyond.rounds is None
    with pytest.raises(ValueError, match="needs strong convexity"):
        rounds_needed(0.5, EPS, flat, quadratic.personal, 1.0)


def test_mu_equal_to_l_needs_two_rounds():
    case = quadratic_case(condition=1.0)
    made = rounds_needed(1.0, 1e-9, case.smoothness, case.personal)
    assert made.rounds == 2
    check_run(case, made)


def test_a_hopeless_condition_is_no_promise(quadratic):
    steep = quadratic.smoothness._replace(convex=np.full(6, 1e-15))
    assert rounds_needed(1.0, 1e-9, steep, quadratic.personal).rounds is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.1}, "alpha: 1.1 is not in"),
        ({"alpha": math.nan}, "alpha: nan"),
        ({"eps": 0.0}, "eps: 0.0 is not a number above 0"),
    ],
)
def test_refusals(quadratic, change, message):
    given = {"alpha": 0.5, "eps": EPS, **change}
    with pytest.raises(ValueError, match=message):
        rounds_needed(
            smoothness=quadratic.smoothness, personal=quadratic.personal, **given
        )
    with pytest.raises(ValueError, match="rounds: -1"):
        largest_alpha(-1, EPS, quadratic.smoothness, quadratic.personal)
