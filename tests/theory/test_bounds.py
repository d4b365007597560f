# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Bounds hold on runs written out in NumPy, and are not empty."""

import numpy as np
import pytest
from flix_by_hand import UNEQUAL, dcgd, descend, diana, known_of, mixed

from fedblend.theory import bounds, steps
from fedblend.theory.constants import Smoothness, mixture

ROUNDING = 1e-12
"""Values of f~ are sums of numbers near 1 in float64."""

SEEDS = 40


def check_descent(case, alpha, rounds):
    known, f = known_of(case, alpha), mixed(case, alpha)
    _, least = f.solve()
    step = steps.dgd(alpha, case.smoothness)
    run = [f.value(x) - least for x in descend(f, known.average, step, rounds)]
    promise = bounds.predicted("dgd", known, rounds)
    assert (np.array(run) <= promise + ROUNDING).all()
    assert (promise <= bounds.dgd_by_diameter(known).after(np.arange(rounds + 1))).all()
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
    promise = bounds.predicted("diana", known, rounds, omega)
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
    step = steps.dcgd(0.5, known.smoothness, 1.0)
    floor = known.L_alpha / 2 * step / known.mu_alpha * noise / 3
    assert bounds.dcgd(known, 1.0).floor == pytest.approx(floor)


def test_without_compression_diana_is_gradient_descent(quadratic):
    known = known_of(quadratic, 0.5)
    assert bounds.diana(known, 0.0).factor == bounds.dgd(known).factor


@pytest.mark.parametrize("alpha", [0.4, UNEQUAL], ids=["equal", "unequal"])
def test_theorem_4_dcgd_reaches_a_neighborhood(quadratic, alpha):
    k, rounds = 2, 200
    omega = 4 / k - 1
    known, f = known_of(quadratic, alpha), mixed(quadratic, alpha)
    _, least = f.solve()
    step = steps.dcgd(alpha, quadratic.smoothness, omega)
    gaps = []
    for seed in range(SEEDS):
        run = dcgd(f, known.average, step, rounds, k, np.random.default_rng(seed))
        gaps.append([f.value(x) - least for x in run])
    gap, spread = means_and_errors(gaps)
    promise = bounds.predicted("dcgd", known, rounds, omega)
    assert (gap <= promise + 3 * spread).all()
    assert 0 < gap[-50:].mean() <= bounds.dcgd(known, omega).floor
    small = known_of(quadratic, 0.1 * known.alpha)
    assert bounds.dcgd(small, omega).floor == pytest.approx(
        0.01 * bounds.dcgd(known, omega).floor
    )


def test_theorems_6_and_7_for_the_mean_of_the_iterates(quadratic):
    k, rounds, alpha = 2, 100, 0.5
    omega = 4 / k - 1
    flat = quadratic.smoothness._replace(convex=np.zeros(6))
    known, f = mixture(alpha, flat, quadratic.personal), mixed(quadratic, alpha)
    best, least = f.solve()
    distance = float(((known.average - best) ** 2).sum())
    ks = np.arange(1, rounds + 1)

    def averaged(iterates):
        means = np.cumsum(iterates[1:], axis=0) / ks[:, None]
        return [f.value(x) - least for x in means]

    step = steps.dcgd_convex(alpha, flat, omega)
    rngs = [np.random.default_rng(seed) for seed in range(SEEDS)]
    runs = [averaged(dcgd(f, known.average, step, rounds, k, rng)) for rng in rngs]
    gap, spread = means_and_errors(runs)
    promise = bounds.dcgd_convex(known, omega, distance, ks)
    assert (gap <= promise + 3 * spread).all()

    step, rate = steps.diana_convex(alpha, flat, omega), 1 / (1 + omega)
    runs = [
        averaged([x for x, _ in diana(f, known.average, step, rounds, k, rate, rng)])
        for rng in rngs
    ]
    gap, spread = means_and_errors(runs)
    promise = bounds.diana_convex(known, omega, distance, ks)
    assert (gap <= promise + 3 * spread).all()
    assert promise[-1] == pytest.approx(promise[0] / rounds)


def test_theorems_8_and_9_for_gradients(quadratic):
    k, rounds, alpha = 2, 100, UNEQUAL
    omega, smoothness = 4 / k - 1, quadratic.smoothness
    f, x = mixed(quadratic, alpha), np.full(4, 3.0)
    pairs = zip(quadratic.clients, quadratic.personal, strict=True)
    local = np.mean([client.value(own) for client, own in pairs])
    gap = float(f.value(x) - local)
    rng = np.random.default_rng(0)
    ks = np.arange(rounds + 1)

    def sizes(iterates):
        return np.array([(f.gradient(x) ** 2).sum() for x in iterates])

    step = steps.dcgd_nonconvex(alpha, smoothness, omega, rounds)
    run = sizes(dcgd(f, x, step, rounds, k, rng))
    promise = bounds.dcgd_nonconvex(alpha, smoothness, omega, rounds, gap, ks)
    assert run[0] <= promise[0]
    assert (np.minimum.accumulate(run)[:-1] <= promise[1:]).all()
    assert promise[-1] <= 2 * np.e * gap / (step * rounds)
    beyond = bounds.dcgd_nonconvex(alpha, smoothness, omega, rounds, gap, rounds + 1)
    assert np.isinf(beyond)

    step = steps.diana_nonconvex(alpha, smoothness, omega)
    run = diana(f, x, step, rounds, k, 1 / (1 + omega), rng, "gradient")
    run = sizes([x for x, _ in run])
    promise = bounds.diana_nonconvex(alpha, smoothness, omega, gap, ks)
    assert (np.cumsum(run)[:-1] / ks[1:] <= promise[1:]).all()


def test_all_alpha_zero_needs_nothing(quadratic):
    none = known_of(quadratic, 0.0)
    for solver in ("dgd", "dcgd", "diana"):
        assert (bounds.predicted(solver, none, 3, omega=1.0) == 0).all()
    assert (bounds.dcgd_convex(none, 1.0, 1.0, np.arange(3)) == 0).all()
    assert (bounds.diana_nonconvex(0.0, none.smoothness, 1.0, 1.0, [0, 1]) == 0).all()


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
    with pytest.raises(ValueError, match="solver: 'sgd'"):
        bounds.predicted("sgd", known, 3)
