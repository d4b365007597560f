# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Convex and nonconvex theorems of FLIX: by hand, and on runs in NumPy."""

import math

import numpy as np
import pytest

from fedblend.theory import steps
from fedblend.theory.bounds import dgd
from fedblend.theory.constants import Smoothness, mixture
from fedblend_reproductions.flix import theory
from flix_by_hand import UNEQUAL, Case, Quadratic, dcgd, diana, known_of, mixed

SEEDS = 40
TWO = Smoothness(np.array([4.0, 1.0]), np.array([1.0, 0.5]), True)
"""Two clients: with alpha = (1/2, 1) both l_i are 1, so L_alpha = 1."""
ALPHA = np.array([0.5, 1.0])
FLAT = TWO._replace(convex=np.zeros(2))


def means_and_errors(runs):
    runs = np.array(runs)
    return runs.mean(axis=0), runs.std(axis=0) / np.sqrt(len(runs))


def test_the_printed_bound_of_descent_is_larger(quadratic):
    known, ks = known_of(quadratic, UNEQUAL), np.arange(30)
    printed = theory.dgd_by_diameter(known, theory.D(quadratic.personal)).value(ks)
    assert (dgd(known).value(ks) <= printed).all()


def top_k(vector, k):
    kept = np.zeros_like(vector)
    for place in np.argsort(-abs(vector))[:k]:
        kept[place] = vector[place]
    return kept


def ef21_p(f, x, rate, rounds, k):
    """All copies w of the clients, who start from zero."""
    w = top_k(x, k)
    points = [w]
    for _ in range(rounds):
        x = x - rate * f.gradient(w)
        w = w + top_k(x - w, k)
        points.append(w)
    return points


def gaps_of(f, points):
    least = f.solve()[1]
    return np.array([f.value(x) - least for x in points])


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
    promise = theory.dcgd(known, omega).value(np.arange(rounds + 1))
    assert (gap <= promise + 3 * spread).all()
    assert 0 < gap[-50:].mean() <= theory.dcgd(known, omega).floor
    small = known_of(quadratic, 0.1 * known.alpha)
    assert theory.dcgd(small, omega).floor == pytest.approx(
        0.01 * theory.dcgd(known, omega).floor
    )


def test_perm_k_ends_in_the_neighborhood_that_is_promised(quadratic):
    alpha, rounds = UNEQUAL, 200
    known, f = known_of(quadratic, alpha), mixed(quadratic, alpha)
    step = steps.perm_k(alpha, quadratic.smoothness)
    total, rng = np.zeros(rounds + 1), np.random.default_rng(0)
    runs = 60
    for _ in range(runs):
        x = known.average
        points = [x]
        for _ in range(rounds):
            owner = rng.permutation(6)[:4]  # six blocks, two of them of zeros
            x = x - step * f.gradients(x)[owner, np.arange(4)]
            points.append(x)
        total += gaps_of(f, points) / runs
    promise = theory.perm_k(known).value(np.arange(rounds + 1))
    assert (total <= promise).all()
    assert 0 < total[-50:].mean() <= theory.perm_k(known).floor


@pytest.mark.parametrize("alpha", [0.3, UNEQUAL], ids=["equal", "unequal"])
def test_every_round_of_ef21_p_is_below_its_bound(quadratic, alpha):
    known, f = known_of(quadratic, alpha), mixed(quadratic, alpha)
    step = steps.downlink(alpha, quadratic.smoothness, 0.5)
    gaps = gaps_of(f, ef21_p(f, known.average, step, 250, 2))
    promise = theory.downlink(known, 0.5).value(np.arange(251))
    assert (gaps <= promise + 1e-12).all()
    assert gaps[-1] < 1e-4 * gaps[0]
    assert promise[-1] < 0.01 * promise[1]


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
    promise = theory.dcgd_convex(known, omega, distance, ks)
    assert (gap <= promise + 3 * spread).all()

    step, rate = steps.diana_convex(alpha, flat, omega), 1 / (1 + omega)
    runs = [
        averaged([x for x, _ in diana(f, known.average, step, rounds, k, rate, rng)])
        for rng in rngs
    ]
    gap, spread = means_and_errors(runs)
    promise = theory.diana_convex(known, omega, distance, ks)
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

    step = theory.dcgd_nonconvex_step(alpha, smoothness, omega, rounds)
    run = sizes(dcgd(f, x, step, rounds, k, rng))
    promise = theory.dcgd_nonconvex(alpha, smoothness, omega, rounds, gap, ks)
    assert run[0] <= promise[0]
    assert (np.minimum.accumulate(run)[:-1] <= promise[1:]).all()
    assert promise[-1] <= 2 * np.e * gap / (step * rounds)
    beyond = theory.dcgd_nonconvex(alpha, smoothness, omega, rounds, gap, rounds + 1)
    assert np.isinf(beyond)

    step = theory.diana_nonconvex_step(alpha, smoothness, omega)
    run = diana(f, x, step, rounds, k, 1 / (1 + omega), rng, "gradient")
    run = sizes([x for x, _ in run])
    promise = theory.diana_nonconvex(alpha, smoothness, omega, gap, ks)
    assert (np.cumsum(run)[:-1] / ks[1:] <= promise[1:]).all()


def test_nonconvex_by_hand():
    assert theory.dcgd_nonconvex_step(ALPHA, FLAT, 2.0, 1) == pytest.approx(
        math.sqrt(1 / 2)
    )
    assert theory.dcgd_nonconvex_step(ALPHA, FLAT, 0.1, 1) == 1
    e = 2 * 1 * 5 / 2
    expected = min(1 / (2 * math.sqrt(e)), 2 / (math.sqrt(1 + 8 * e) + 1))
    assert theory.diana_nonconvex_step(ALPHA, FLAT, 1.0) == pytest.approx(expected)
    stiff = Smoothness(np.array([7.0, 1.0]), np.zeros(2), True)
    assert theory.diana_nonconvex_step(1.0, stiff, 1.0) == pytest.approx(expected / 5)


def test_memory_range_contains_the_usual_rate():
    for omega in (0.01, 0.5, 1.0, 9.0, 200.0):
        low, high = theory.memory_range(omega)
        assert low == 1 / (1 + omega)
        assert low < high <= 1.5 * low
        for rate in (low, high):  # theta >= 1/(2 (1 + omega)), as the proof needs
            r = 2 * (1 + omega)
            theta = 2 * rate - (1 - rate) / r - rate**2 * (1 + omega)
            assert min(1 - rate**2 * omega, theta) >= (1 - 1e-12) / (2 * (1 + omega))
        theory.diana_nonconvex_step(1.0, TWO, omega, high)


def test_one_stiff_client_needs_the_root_mean_square():
    """999 flat clients and a stiff one: at the paper's step DIANA diverges."""
    n, dim, k = 1000, 10, 1
    stiff = np.zeros((n, dim, dim))
    stiff[0] = np.eye(dim)
    clients = [Quadratic(A, np.zeros(dim)) for A in stiff]
    smoothness = Smoothness(np.eye(n)[0], np.zeros(n), True)
    case = Case(None, clients, np.zeros((n, dim)), smoothness)  # pyright: ignore
    f, omega, x = mixed(case, 1.0), dim / k - 1, np.ones(dim)
    ours = theory.diana_nonconvex_step(1.0, smoothness, omega)
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
    ours = theory.dcgd_nonconvex_step(1.0, case.smoothness, dim / k - 1, rounds)
    calm, wild = (
        dcgd(f, np.ones(dim), step, 200, k, np.random.default_rng(0))[-1]
        for step in (ours, steps.dgd(1.0, case.smoothness))
    )
    assert np.linalg.norm(calm) < 10
    assert np.linalg.norm(wild) > 1e10


def test_without_compression_or_mixing(quadratic):
    plain = steps.dgd(ALPHA, TWO)
    assert theory.dcgd_nonconvex_step(ALPHA, TWO, 0, 100) == plain
    assert theory.diana_nonconvex_step(ALPHA, TWO, 0) == plain
    none = known_of(quadratic, 0.0)
    assert (theory.dcgd_convex(none, 1.0, 1.0, np.arange(3)) == 0).all()
    assert (theory.diana_nonconvex(0.0, none.smoothness, 1.0, 1.0, [0, 1]) == 0).all()


@pytest.mark.parametrize(
    "step",
    [
        lambda alpha: theory.diana_nonconvex_step(alpha, TWO, [3, 1]),
        lambda alpha: theory.dcgd_nonconvex_step(alpha, TWO, 3, 50),
    ],
    ids=["diana", "dcgd"],
)
def test_steps_grow_like_one_over_alpha_squared(step):
    assert step(0.1 * ALPHA) == pytest.approx(100 * step(ALPHA))
    assert step(0.0) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.diana_nonconvex_step(0.5, TWO, None), "omega: None"),
        (lambda: theory.diana_nonconvex_step(0.5, TWO, 3, 0.1), "memory_rate: 0.1"),
        (lambda: theory.diana_nonconvex_step(0.5, TWO, 3, [0.25, 0.26]), "one number"),
        (lambda: theory.dcgd_nonconvex_step(0.5, TWO, 3, 0), "horizon: 0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
