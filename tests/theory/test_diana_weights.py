# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DIANA's Lyapunov weights: against brute force, and exactly on quadratics.

DIANA with rand-k on quadratics is a random linear map of ``(x - x*, h_i - g_i*)``, so
that everything that theory says about second moments can be computed without sampling.
"""

import itertools

import numpy as np
import pytest

from fedblend.theory import steps
from fedblend.theory.constants import Smoothness
from fedblend.theory.steps import factor_and_weight
from flix_by_hand import quadratic_case


@pytest.mark.parametrize("part", [1.0, 0.5, 0.05])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.95])
def test_no_other_weights_are_better(part, share):
    """The smallest q over a grid of t and s, from the inequalities as they stand."""
    omega = 3.0
    b = part / (1 + omega)
    c, r = 1 - part, share * b
    t = np.geomspace(0.05 / b, 100 / b, 4000)[:, None]
    s = np.geomspace(1e-2, 1e2, 1000)[None, :]
    v = 1 - t * b * c
    allowed = (v >= 0) & ((1 + 1 / s) * v <= t * (b - r))
    q = np.where(allowed, (1 + s) * v + t * b, np.inf)
    factor, weight = factor_and_weight(np.array([b]), np.array([omega]), r)
    assert factor[0] <= q.min() <= 1.02 * factor[0]
    assert weight[0] == pytest.approx(t[q.argmin() // 1000, 0], rel=0.15)


def random_maps(case, step, rates, k):
    """Every outcome of a round as a matrix over (x - x*, h_1 - g_1* ...)."""
    n, dim = len(case.clients), len(case.clients[0].b)
    kept = [np.diag(np.isin(range(dim), places) * dim / k)
            for places in itertools.combinations(range(dim), k)]  # fmt: skip
    for masks in itertools.product(kept, repeat=n):
        round_map = np.eye((n + 1) * dim)
        for i, mask in enumerate(masks):
            own = slice((i + 1) * dim, (i + 2) * dim)
            sent = np.zeros((dim, (n + 1) * dim))  # C(g_i - h_i), of the whole state
            sent[:, :dim] = mask @ case.clients[i].A
            sent[:, own] = -mask
            round_map[:dim] -= step / n * sent
            round_map[:dim, own] -= step / n * np.eye(dim)
            round_map[own] += rates[i] * sent
        yield round_map


CASES = {
    "fastest memories": (1.0, 2, 8.0, 1),
    "ill-conditioned": (1.0, 2, 500.0, 1),
    "slow memories": (0.3, 2, 8.0, 1),
    "well-conditioned": (0.5, 2, 1.2, 1),
    "three clients": (0.5, 3, 30.0, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_lyapunov_function_shrinks_as_promised_exactly(name):
    """E Psi+ <= (1 - r) Psi at every state: one inequality between matrices."""
    part, n, condition, k = CASES[name]
    case = quadratic_case(n, dim=3, condition=condition)
    omega = 3 / k - 1
    rates = np.full(n, part / (1 + omega))
    found = steps.diana_guarantee(1.0, case.smoothness, omega, rates)
    old = 1 / steps._diana_bound(1.0, case.smoothness, omega, rates)
    mu = case.smoothness.convex.mean()
    assert found.step > old
    assert found.contraction > min(old * mu, rates[0] / 2)

    weights = found.step**2 / n * found.weights * omega / n
    potential = np.diag(np.repeat([1, *weights], 3))
    maps = list(random_maps(case, found.step, rates, k))
    after = np.mean([m.T @ potential @ m for m in maps], axis=0)
    gaps = np.linalg.eigvalsh((1 - found.contraction) * potential - after)
    assert gaps.min() >= -1e-12
    second_moments = np.mean([np.kron(m, m) for m in maps], axis=0)
    true = max(abs(np.linalg.eigvals(second_moments)))
    assert true <= 1 - found.contraction

    far = list(random_maps(case, 8 * found.step, rates, k))
    beyond = np.mean([np.kron(m, m) for m in far], axis=0)
    assert max(abs(np.linalg.eigvals(beyond))) > 1


def test_one_client_with_noise_alone_limits_the_step():
    """A client that sends everything needs no memory, whatever its rate."""
    smooth, convex = np.array([1.0, 2.0]), np.full(2, 0.1)
    known = Smoothness(smooth, convex, True)
    omega = np.array([0.0, 3.0])
    found = steps.diana_guarantee(1.0, known, omega, [1e-3, 0.25])
    assert found.step == steps.diana(1.0, known, omega)
    assert found.weights[0] == 0 < found.weights[1]
    assert found.contraction == pytest.approx(found.step * 0.1)
