# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The planner keeps its promise when run, and its two directions are inverse."""

import math

import numpy as np
import pytest
from flix_by_hand import UNEQUAL, descend, diana, known_of, mixed, quadratic_case

from fedblend.theory import plan, steps
from fedblend.theory.plan import Plan, Solver, Traffic

EPS = 1e-3
DIANA = Solver("diana", omega=1.0)
GRID = np.linspace(0, 1, 41)
SOLVERS = pytest.mark.parametrize("solver", [plan.DGD, DIANA], ids=["dgd", "diana"])
SHAPES = pytest.mark.parametrize("shape", [1.0, UNEQUAL], ids=["equal", "unequal"])


def check_run(case, made: Plan, shape=1.0):
    """Gradient descent for the planned rounds reaches the accuracy of the plan."""
    assert made.rounds is not None
    alpha = made.alpha * np.asarray(shape)
    known, f = known_of(case, alpha), mixed(case, alpha)
    step = steps.dgd(alpha, case.smoothness)
    last = descend(f, known.average, step, max(made.rounds - 1, 0))[-1]
    assert f.value(last) - f.solve()[1] <= made.bound + 1e-12
    assert made.bound <= made.eps * (1 + 2e-9)


@SHAPES
@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.4, 1.0])
def test_the_promise_holds_when_run(quadratic, alpha, shape):
    made = plan.rounds_needed(
        alpha, EPS, quadratic.smoothness, quadratic.personal, shape=shape
    )
    check_run(quadratic, made, shape)


@pytest.mark.parametrize(("name", "n"), [("ijcnn1", 8), ("a6a", 20), ("mushrooms", 20)])
@pytest.mark.parametrize("rounds", [1, 4, 12])
def test_the_promise_holds_on_real_data(real, name, n, rounds):
    case = real(name, n)
    made = plan.largest_alpha(rounds, 3e-3, case.smoothness, case.personal)
    assert 0 < made.alpha <= 1
    check_run(case, made)


def test_the_promise_of_diana_holds_on_average(quadratic):
    made = plan.rounds_needed(
        0.5, EPS, quadratic.smoothness, quadratic.personal, solver=DIANA
    )
    assert made.rounds is not None
    known, f = known_of(quadratic, 0.5), mixed(quadratic, 0.5)
    step = steps.diana(0.5, quadratic.smoothness, 1.0)
    ends = [
        diana(f, known.average, step, made.rounds - 1, 2, 0.5, rng)[-1][0]
        for rng in map(np.random.default_rng, range(20))
    ]
    assert np.mean([f.value(x) for x in ends]) - f.solve()[1] <= made.bound <= EPS


def test_the_papers_formula_for_equal_alpha(quadratic):
    known = known_of(quadratic, 1.0)
    A = math.sqrt(2 * EPS / (known.mean_smooth * known.V))
    q = 1 / math.sqrt(1 - known.mean_convex / known.mean_smooth)
    arguments = (EPS, quadratic.smoothness, quadratic.personal)
    for rounds in range(1, 12):
        made = plan.largest_alpha(rounds, *arguments)
        assert made.alpha == pytest.approx(min(1, A * q ** (rounds - 1)), rel=1e-9)
    for k in (1, 2, 3):
        inside = A * q ** (k - 0.5)
        assert plan.rounds_needed(inside, *arguments).rounds == k + 1
    assert plan.rounds_needed(A / 2, *arguments).rounds == 1


@SHAPES
@SOLVERS
def test_the_directions_are_inverse(quadratic, solver, shape):
    arguments = (EPS, quadratic.smoothness, quadratic.personal)
    budgets = sorted({1, 2, 3, 5, 8, 13, 30, 80, 200})
    for rounds in budgets:
        most = plan.largest_alpha(rounds, *arguments, solver=solver, shape=shape)
        assert most.rounds is not None
        assert most.rounds <= rounds
        assert most.bound <= EPS * (1 + 2e-9)
        if most.alpha < 1:
            beyond = min(1.0, most.alpha * (1 + 1e-6))
            more = plan.rounds_needed(beyond, *arguments, solver=solver, shape=shape)
            assert more.rounds is None or more.rounds > rounds
    for alpha in GRID:
        made = plan.rounds_needed(alpha, *arguments, solver=solver, shape=shape)
        assert made.rounds is not None
        back = plan.largest_alpha(made.rounds, *arguments, solver=solver, shape=shape)
        assert back.alpha >= alpha * (1 - 1e-9)


@SHAPES
@SOLVERS
def test_plans_are_monotone(quadratic, solver, shape):
    made = plan.table(
        GRID, EPS, quadratic.smoothness, quadratic.personal, solver=solver, shape=shape
    )
    rounds = [row.rounds for row in made]
    assert None not in rounds
    assert (np.diff(np.array(rounds, int)) >= 0).all()
    assert [row.alpha for row in made] == list(GRID)
    assert rounds[0] == 0
    assert len(set(rounds)) > 3
    alphas = [
        plan.largest_alpha(
            budget, EPS, quadratic.smoothness, quadratic.personal, solver=solver
        ).alpha
        for budget in range(60)
    ]
    assert (np.diff(alphas) >= 0).all()


def test_bits(quadratic):
    arguments = (EPS, quadratic.smoothness, quadratic.personal)
    prices = Traffic(first=1000, later=100, start=500)
    for rounds in range(8):
        bits = plan.spent_bits(rounds, prices)
        assert plan.affordable_rounds(bits, prices) == rounds
        assert plan.affordable_rounds(bits + 99, prices) == rounds
    assert plan.affordable_rounds(999, prices) == 0
    assert plan.affordable_rounds(1400, prices) == 1
    made = plan.rounds_needed(0.5, *arguments, solver=DIANA, traffic=prices)
    assert made.bits is not None
    assert made.bits == plan.spent_bits(made.rounds or 0, prices)
    back = plan.largest_alpha_for_bits(made.bits, *arguments, prices, solver=DIANA)
    assert back.alpha >= 0.5
    assert back.rounds == made.rounds
    less = plan.largest_alpha_for_bits(made.bits - 1, *arguments, prices, solver=DIANA)
    assert less.alpha < 0.5
    assert plan.largest_alpha_for_bits(10, *arguments, prices).alpha == 0


class TestEdges:
    def test_alpha_zero_needs_nothing(self, quadratic):
        made = plan.rounds_needed(0.0, EPS, quadratic.smoothness, quadratic.personal)
        assert (made.rounds, made.bound) == (0, 0.0)

    def test_no_rounds_allow_alpha_zero_only(self, quadratic):
        made = plan.largest_alpha(0, EPS, quadratic.smoothness, quadratic.personal)
        assert (made.alpha, made.rounds, made.bound) == (0.0, 0, 0.0)

    @SOLVERS
    def test_equal_models_need_one_round(self, quadratic, solver):
        same = np.ones((6, 4))
        made = plan.rounds_needed(1.0, EPS, quadratic.smoothness, same, solver=solver)
        assert (made.rounds, made.bound) == (1, 0.0)
        most = plan.largest_alpha(1, EPS, quadratic.smoothness, same, solver=solver)
        assert most.alpha == 1

    def test_without_strong_convexity_nothing_beyond_one_shot(self, quadratic):
        flat = quadratic.smoothness._replace(convex=np.zeros(6))
        one = plan.largest_alpha(1, EPS, flat, quadratic.personal)
        many = plan.largest_alpha(1000, EPS, flat, quadratic.personal)
        assert 0 < one.alpha == many.alpha < 1
        assert many.rounds == 1
        beyond = plan.rounds_needed(2 * one.alpha, EPS, flat, quadratic.personal)
        assert beyond.rounds is None
        assert beyond.bits is None
        assert beyond.bound == math.inf
        with pytest.raises(ValueError, match="needs strong convexity"):
            plan.rounds_needed(0.5, EPS, flat, quadratic.personal, solver=DIANA)

    def test_mu_equal_to_l_needs_two_rounds(self):
        case = quadratic_case(condition=1.0)
        made = plan.rounds_needed(1.0, 1e-9, case.smoothness, case.personal)
        assert made.rounds == 2
        check_run(case, made)

    def test_a_hopeless_condition_is_no_promise(self, quadratic):
        steep = quadratic.smoothness._replace(convex=np.full(6, 1e-15))
        made = plan.rounds_needed(1.0, 1e-9, steep, quadratic.personal)
        assert made.rounds is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.1}, "alpha: 1.1 is not in"),
        ({"alpha": math.nan}, "alpha: nan"),
        ({"eps": 0.0}, "eps: 0.0 is not a number above 0"),
        ({"solver": Solver("adam")}, "solver: 'adam'"),
        ({"solver": Solver("diana", omega=None)}, "omega: None"),
        ({"solver": Solver("diana", 3.0, 0.5)}, "memory_rate: 0.5"),
        ({"shape": 0.5}, "shape: its largest entry is 0.5, not 1"),
    ],
)
def test_refusals(quadratic, change, message):
    given = {"alpha": 0.5, "eps": EPS, **change}
    with pytest.raises(ValueError, match=message):
        plan.rounds_needed(
            smoothness=quadratic.smoothness, personal=quadratic.personal, **given
        )


def test_budgets_are_checked(quadratic):
    with pytest.raises(ValueError, match="rounds: -1"):
        plan.largest_alpha(-1, EPS, quadratic.smoothness, quadratic.personal)
    with pytest.raises(ValueError, match="bits: -1"):
        plan.affordable_rounds(-1, Traffic(1, 1))
    with pytest.raises(ValueError, match="traffic: "):
        plan.affordable_rounds(10, Traffic(1, 0))
