# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Bounds hold on runs written out in NumPy, and are not empty."""

import numpy as np
import pytest

from fedblend.theory import bounds, steps
from fedblend.theory.constants import Smoothness
from flix_by_hand import UNEQUAL, descend, diana, known_of, mixed

ROUNDING = 1e-12
"""Values of f~ are sums of numbers near 1 in float64."""

SEEDS = 40


def check_descent(case, alpha, rounds):
    known, f = known_of(case, alpha), mixed(case, alpha)
    _, least = f.solve()
    step = steps.dgd(alpha, case.smoothness)
    run = [f.value(x) - least for x in descend(f, known.average, step, rounds)]
    promise = bounds.dgd(known).value(np.arange(rounds + 1))
    assert (np.array(run) <= promise + ROUNDING).all()
    return np.array(run), promise


@pytest.mark.parametrize("alpha", [0.2, 1.0, UNEQUAL], ids=["0.2", "1", "unequal"])
def test_theorem_2_gradient_descent_at_every_round(quadratic, alpha):
    run, promise = check_descent(quadratic, alpha, 60)
    assert run[0] > 0.005 * promise[0]
    assert promise[-1] < 1e-2 * promise[0]


@pytest.mark.parametrize("alpha", [0.1, 1.0, "unequal"])
@pytest.mark.parametrize(("name", "n"), [("ijcnn1", 8), ("a6a", 20), ("mushrooms", 20)])
def test_theorem_2_on_real_data(real, name, n, alpha):
    alpha = np.linspace(0.05, 1, n) if alpha == "unequal" else alpha
    _, promise = check_descent(real(name, n), alpha, 25)
    assert promise[-1] < promise[0]


def means_and_errors(runs):
    runs = np.array(runs)
    return runs.mean(axis=0), runs.std(axis=0) / np.sqrt(len(runs))


@pytest.mark.parametrize("start", ["zero", "gradient"])
@pytest.mark.parametrize("alpha", [0.4, UNEQUAL], ids=["equal", "unequal"])
def test_theorem_5_diana_on_average(quadratic, alpha, start):
    """Both the Lyapunov function from its true start, and f~ from constants alone."""
    k, rounds, n = 2, 150, 6
    omega = 4 / k - 1
    known, f = known_of(quadratic, alpha), mixed(quadratic, alpha)
    best, least = f.solve()
    at_best = f.gradients(best)
    found = steps.diana_guarantee(alpha, quadratic.smoothness, omega)
    step, rate = found.step, 1 / (1 + omega)
    weights = found.step**2 / n * found.weights
    potentials, gaps = [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        run = diana(f, known.average, step, rounds, k, rate, rng, start)
        potentials.append(
            [
                (x - best) @ (x - best)
                + omega * weights @ ((h - at_best) ** 2).sum(axis=1) / n
                for x, h in run
            ]
        )
        gaps.append([f.value(x) - least for x, _ in run])
    curve = bounds.diana(known, omega)
    potential, spread = means_and_errors(potentials)
    powers = curve.factor ** np.arange(rounds + 1)
    assert (potential <= powers * potential[0] + 3 * spread + ROUNDING).all()
    assert potential[0] <= curve.start * 2 / known.L_alpha
    gap, spread = means_and_errors(gaps)
    promise = bounds.diana(known, omega).value(np.arange(rounds + 1))
    assert (gap <= promise + 3 * spread + ROUNDING).all()
    assert promise[-1] < 0.1 * promise[1]
    assert gap[-1] < 1e-3 * gap[0]


@pytest.mark.parametrize("alpha", [0.4, UNEQUAL], ids=["equal", "unequal"])
def test_what_the_bounds_know_of_the_start(quadratic, alpha):
    omega = np.array([0, 1, 3, 3, 1, 0.5])
    known, f = known_of(quadratic, alpha), mixed(quadratic, alpha)
    best, _ = f.solve()
    distance = ((known.average - best) ** 2).sum()
    assert distance <= bounds.start_distance(known)
    at_best, noise = f.gradients(best), bounds.memory_noise(known, omega)
    for memory in (np.zeros_like(at_best), f.gradients(known.average)):
        true = np.mean(omega * ((memory - at_best) ** 2).sum(axis=1))
        assert 0 < true <= noise
    stiff = known.alpha**2 * known.smoothness.smooth
    assert noise == pytest.approx((omega * stiff).max() * known.L_alpha * known.V)
    assert np.mean(omega * (at_best**2).sum(axis=1)) > 0.01 * noise


def test_theorem_5_curve_by_hand(quadratic):
    known = known_of(quadratic, 0.5)
    found, noise = (
        steps.diana_guarantee(0.5, known.smoothness, 1.0),
        bounds.memory_noise(known, 1),
    )
    memories = found.step**2 / 6 * found.weights.max() * noise
    curve = bounds.diana(known, 1.0)
    start = known.L_alpha * known.V / known.mu_alpha + memories
    assert curve.start == pytest.approx(known.L_alpha / 2 * start)
    assert curve.factor == pytest.approx(1 - found.step * known.mu_alpha)


def test_without_compression_diana_is_gradient_descent(quadratic):
    known = known_of(quadratic, 0.5)
    assert bounds.diana(known, 0.0).factor == bounds.dgd(known).factor


def test_all_alpha_zero_needs_nothing(quadratic):
    none = known_of(quadratic, 0.0)
    for bound in (bounds.dgd(none), bounds.diana(none, 1.0)):
        assert (bound.value(np.arange(4)) == 0).all()


def test_refusals(quadratic):
    known = known_of(quadratic, 0.5)
    flat = known._replace(
        mu_alpha=0.0, smoothness=known.smoothness._replace(convex=np.zeros(6))
    )
    assert isinstance(flat.smoothness, Smoothness)
    with pytest.raises(ValueError, match="diana: needs strong convexity"):
        bounds.diana(flat, 1.0)
    with pytest.raises(ValueError, match="needs strong convexity"):
        bounds.start_distance(flat)
