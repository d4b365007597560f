# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One-shot averaging: the bounds hold, can be attained, and turn into conditions."""

import numpy as np
import pytest

from fedblend.theory.bounds import one_shot, require_minimizers
from fedblend.theory.constants import mixture
from fedblend_reproductions.flix.theory import (
    D,
    M,
    one_shot_alpha,
    one_shot_by_diameter,
    one_shot_gradient,
    one_shot_gradient_alpha,
    one_shot_gradient_by_diameter,
    stationary_weights,
)
from flix_by_hand import UNEQUAL, known_of, mixed, quadratic_case


@pytest.mark.parametrize("alpha", [0.2, 1.0, UNEQUAL], ids=["0.2", "1", "unequal"])
def test_theorem_1_one_shot(quadratic, alpha):
    known, f = known_of(quadratic, alpha), mixed(quadratic, alpha)
    gap = f.value(known.average) - f.solve()[1]
    assert (
        0 < gap <= one_shot(known) <= one_shot_by_diameter(known, D(quadratic.personal))
    )


def test_theorem_1_is_attained():
    """Two clients of one curvature, alpha = 1: f_i(x_avg) - f_i* is L V/2 in mean."""
    case = quadratic_case(clients=4, condition=1.0)
    known, f = known_of(case, 1.0), mixed(case, 1.0)
    pairs = zip(case.clients, case.personal, strict=True)
    local = np.mean([client.value(x) for client, x in pairs])
    assert f.value(known.average) - local == pytest.approx(one_shot(known))


@pytest.mark.parametrize("eps", [1e-3, 1e-2])
def test_theorem_1_as_a_condition_on_alpha(quadratic, eps):
    best = one_shot_alpha(eps, quadratic.smoothness, known_of(quadratic, 1.0).V)
    assert 0 < best < 1
    known, f = known_of(quadratic, best), mixed(quadratic, best)
    assert f.value(known.average) - f.solve()[1] <= eps
    assert one_shot(known) == pytest.approx(eps)
    diameter = D(quadratic.personal)
    limit = one_shot_alpha(eps, quadratic.smoothness, diameter)
    shape = limit * UNEQUAL
    assert one_shot(known_of(quadratic, shape)) <= eps
    printed = one_shot_by_diameter(known_of(quadratic, shape), diameter)
    assert printed == pytest.approx(eps)


@pytest.mark.parametrize("alpha", [0.3, UNEQUAL], ids=["equal", "unequal"])
def test_theorem_3_one_shot_for_stationary_points(quadratic, alpha):
    """The same problem with every second f_i turned upside down: not convex."""
    turned = [
        f._replace(A=f.A * sign, b=f.b * sign)
        for f, sign in zip(quadratic.clients, [1, -1] * 3, strict=True)
    ]
    case, smoothness = quadratic._replace(clients=turned), quadratic.smoothness
    average = stationary_weights(alpha, smoothness) @ case.personal
    size = np.linalg.norm(mixed(case, alpha).gradient(average))
    bound = one_shot_gradient(alpha, smoothness, case.personal)
    assert 0.01 * bound < size <= bound
    assert bound <= one_shot_gradient_by_diameter(alpha, smoothness, case.personal)


def test_theorem_3_as_a_condition_on_alpha(quadratic):
    smoothness, models = quadratic.smoothness, quadratic.personal
    own = stationary_weights(1.0, smoothness)
    variance = own @ ((models - own @ models) ** 2).sum(axis=1)
    best = one_shot_gradient_alpha(0.1, smoothness, variance)
    assert one_shot_gradient(best, smoothness, models) == pytest.approx(0.1)
    limit = one_shot_gradient_alpha(0.1, smoothness, D(models))
    assert one_shot_gradient_by_diameter(limit, smoothness, models) == pytest.approx(
        0.1
    )


@pytest.mark.parametrize(("name", "n"), [("ijcnn1", 8), ("a6a", 20), ("mushrooms", 20)])
def test_theorem_1_on_real_data(real, name, n):
    case = real(name, n)
    known, f = known_of(case, 0.3), mixed(case, 0.3)
    norms = [
        np.linalg.norm(client.gradient(x))
        for client, x in zip(case.clients, case.personal, strict=True)
    ]
    require_minimizers(norms)
    gap = f.value(known.average) - f.solve()[1]
    assert 0 < gap <= one_shot(known)


def test_equal_models_need_nothing(quadratic):
    same = np.ones((6, 4))
    assert one_shot(mixture(1.0, quadratic.smoothness, same)) == 0
    assert one_shot_alpha(1e-3, quadratic.smoothness, 0.0) == 1


def test_refusals(quadratic):
    with pytest.raises(ValueError, match="eps: 0"):
        one_shot_alpha(0, quadratic.smoothness, 1.0)
    require_minimizers([1e-9, 0.0])
    with pytest.raises(ValueError, match=r"client 1 has gradient norm 0.001, over"):
        require_minimizers([1e-9, 1e-3, np.nan])


def test_what_the_theorems_measure(quadratic):
    models, smooth = quadratic.personal, quadratic.smoothness.smooth
    own = UNEQUAL**2 * smooth
    np.testing.assert_allclose(
        stationary_weights(UNEQUAL, quadratic.smoothness), own**2 / (own**2).sum()
    )
    pairs = [((x - y) ** 2).sum() for x in models for y in models]
    assert D(models) == pytest.approx(max(pairs))
    assert D(models) >= known_of(quadratic, 1.0).V
    assert M(quadratic.smoothness) == pytest.approx(np.mean(smooth**2))
