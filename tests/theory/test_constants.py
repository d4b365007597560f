# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L_i and mu_i against eigenvalues of Hessians, the mixture's against f~ itself."""

import jax
import numpy as np
import pytest

from fedblend import trees
from fedblend.data.federated import federate
from fedblend.losses import cross_entropy, l2
from fedblend.models import softmax
from fedblend.theory import constants
from fedblend.theory.constants import L_alpha, V, mixture, mu_alpha, weights
from flix_by_hand import UNEQUAL, descend, mixed, quadratic_case


def random_rows(rows=40, dim=3, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, dim)) * [1, 2, 5]
    targets = rng.integers(0, classes, rows)
    return federate((inputs, targets), np.split(np.arange(rows), [10, 12]))


def test_logistic_is_the_hessian_at_zero(real):
    case = real("ijcnn1", 8)
    zero = np.zeros(case.personal.shape[1])
    for i, f in enumerate(case.clients):
        assert case.smoothness.smooth[i] == pytest.approx(
            np.linalg.eigvalsh(f.hessian(zero))[-1], rel=1e-10
        )
    assert (case.smoothness.convex == 0.1).all()
    assert case.smoothness.exact


def test_an_intercept_is_a_column_of_ones():
    federated_data = random_rows(classes=2)
    inputs, targets = federated_data.train.examples
    longer = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    parts = np.split(np.arange(len(inputs)), [10, 12])
    same = federate((longer, targets), parts)
    with_intercept = constants.logistic(federated_data, 0.1, intercept=True)
    np.testing.assert_allclose(
        with_intercept.smooth, constants.logistic(same, 0.1).smooth
    )
    assert (
        with_intercept.smooth > constants.logistic(federated_data, 0.1).smooth
    ).all()


def test_least_squares_is_between_the_extreme_eigenvalues():
    federated_data = random_rows()
    found = constants.least_squares(federated_data, l2=0.2)
    for i in range(3):
        inputs, _ = federated_data.train.rows(i)
        values = np.linalg.eigvalsh(inputs.T @ inputs / len(inputs)) + 0.2
        np.testing.assert_allclose(found.smooth[i], values[-1], rtol=1e-12)
        np.testing.assert_allclose(found.convex[i], values[0], rtol=1e-9)
    assert found.convex[1] == pytest.approx(0.2)  # two rows, three columns


def test_softmax_is_a_bound_that_is_nearly_reached():
    """Against the Hessian at zero and at other points."""
    federated_data = random_rows()
    model = softmax(3, 3, intercept=False)
    zero, layout = trees.ravel(model.init(jax.random.key(0)))
    loss = l2(cross_entropy(model.apply), 0.1)
    bound = constants.softmax(federated_data, 0.1)
    assert not bound.exact

    def value(point, rows):
        return loss(trees.unravel(point, layout), rows).mean()

    hessian = jax.jit(jax.hessian(value))
    points = [zero, *np.random.default_rng(0).normal(size=(3, 9))]
    for i in range(3):
        rows = federated_data.train.rows(i)
        values = np.array([np.linalg.eigvalsh(hessian(x, rows)) for x in points])
        assert 0.5 * bound.smooth[i] <= values.max() <= bound.smooth[i] * (1 + 1e-5)
        assert values.min() >= 0.1 - 1e-4


def test_lanczos_bounds_the_largest_eigenvalue_from_above():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 400)) * np.geomspace(1, 1.2, 400)
    exact = constants.gram_extremes(rows)
    bound = constants.gram_extremes(rows, exact_limit=10)
    assert exact[2] and not bound[2]
    assert exact[1] <= bound[1] <= 1.0102 * exact[1]
    assert bound[0] == 0
    assert constants.largest_eigenvalue(lambda v: 0 * v, 5) == 0
    assert constants.largest_eigenvalue(lambda v: v, 5) == pytest.approx(1 / 0.99)


def test_proposition_1_gradient_steps_mix_start_and_minimizer(quadratic):
    f, own = quadratic.clients[0], quadratic.personal[0]
    step, start = 0.9 / np.linalg.eigvalsh(f.A)[-1], np.arange(4.0)
    reached = descend(f, start, step, 7)[-1]
    J = np.linalg.matrix_power(np.eye(4) - step * f.A, 7)
    np.testing.assert_allclose(reached, (np.eye(4) - J) @ own + J @ start, rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.3, UNEQUAL], ids=["equal", "unequal"])
def test_proposition_2_on_quadratics(quadratic, alpha):
    f = mixed(quadratic, alpha)
    values = np.linalg.eigvalsh(f.hessian(np.zeros(4)))
    assert values[-1] <= L_alpha(alpha, quadratic.smoothness) * (1 + 1e-12)
    assert values[0] >= mu_alpha(alpha, quadratic.smoothness) * (1 - 1e-12)


def test_proposition_2_is_attained_where_all_clients_agree():
    case = quadratic_case(clients=1)
    values = np.linalg.eigvalsh(mixed(case, 0.5).hessian(np.zeros(4)))
    assert L_alpha(0.5, case.smoothness) == pytest.approx(values[-1])
    assert mu_alpha(0.5, case.smoothness) == pytest.approx(values[0])


def test_proposition_2_on_real_data_by_differences(real):
    case = real("a6a", 20)
    alpha = np.linspace(0.05, 1, 20)
    f, rng = mixed(case, alpha), np.random.default_rng(0)
    top = L_alpha(alpha, case.smoothness)
    bottom = mu_alpha(alpha, case.smoothness)
    for _ in range(5):
        x, y = rng.normal(size=(2, case.personal.shape[1]))
        change, gap = f.gradient(x) - f.gradient(y), x - y
        assert np.linalg.norm(change) <= top * np.linalg.norm(gap)
        assert change @ gap >= bottom * gap @ gap * (1 - 1e-12)


def test_proposition_3_deployed_models_are_closer_together(quadratic):
    uniform = np.full(6, 1 / 6)
    deployed = mixed(quadratic, 0.3).places(np.ones(4))
    assert V(deployed, uniform) == pytest.approx(
        0.7**2 * V(quadratic.personal, uniform)
    )


def test_weights_minimize_what_the_theorems_bound(quadratic):
    smooth, models = quadratic.smoothness.smooth, quadratic.personal
    own = UNEQUAL**2 * smooth
    known = mixture(UNEQUAL, quadratic.smoothness, models)
    np.testing.assert_allclose(
        weights(UNEQUAL, quadratic.smoothness), own / own.sum(), rtol=1e-12
    )

    def error(x):
        return 0.5 * np.mean(own * ((x - models) ** 2).sum(axis=1))

    assert error(known.average) == pytest.approx(known.L_alpha * known.V / 2)
    assert error(known.average + 1e-3) > error(known.average)


def test_models_may_be_trees(quadratic):
    models = quadratic.personal
    tree = {"bias": models[:, 0], "weight": models[:, 1:].reshape(6, 3, 1)}
    uniform = np.full(6, 1 / 6)
    assert V(tree, uniform) == pytest.approx(V(models, uniform))


def test_equal_alpha_leaves_v_and_the_average_alone(quadratic):
    few, many = (
        mixture(a, quadratic.smoothness, quadratic.personal) for a in (0.1, 1.0)
    )
    np.testing.assert_allclose(few.average, many.average, rtol=1e-12)
    assert pytest.approx(many.V) == few.V
    assert few.L_alpha == pytest.approx(0.01 * quadratic.smoothness.smooth.mean())


def test_all_alpha_zero_has_constants_too(quadratic):
    none = mixture(0.0, quadratic.smoothness, quadratic.personal)
    assert none.L_alpha == none.mu_alpha == 0
    np.testing.assert_allclose(none.average, quadratic.personal.mean(axis=0))


@pytest.mark.parametrize("alpha", [-0.1, 1.5, np.nan, [0.5, 0.5]])
def test_alpha_is_checked(quadratic, alpha):
    with pytest.raises(ValueError, match="alpha: "):
        mixture(alpha, quadratic.smoothness, quadratic.personal)


def test_other_input_is_checked(quadratic):
    with pytest.raises(ValueError, match="l2: -1"):
        constants.logistic(random_rows(), -1)
    with pytest.raises(ValueError, match="5 models for 6 clients"):
        mixture(0.5, quadratic.smoothness, quadratic.personal[:5])


ANCHOR = (
    0.429032,
    0.429231,
    0.429564,
    0.430030,
    0.430630,
    0.431362,
    0.432229,
    0.433228,
    0.434362,
    0.435629,
)
"""Smallest f~ on ijcnn1, 8 contiguous clients, for alpha = .1, .2 ... 1."""


def test_the_smallest_values_on_ijcnn1(real):
    case = real("ijcnn1", 8)
    for f, x in zip(case.clients, case.personal, strict=True):
        assert np.linalg.norm(f.gradient(x)) < 1e-11
    for tenths, value in enumerate(ANCHOR, start=1):
        assert mixed(case, tenths / 10).solve()[1] == pytest.approx(value, abs=1e-6)
