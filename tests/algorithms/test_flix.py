# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX on quadratics, where everything is known, and at its ends alpha = 0 and 1."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedblend import fedavg, losses, mixing, models, scaffold, solvers
from fedblend.algorithms.fedopt import fedopt
from fedblend.algorithms.flix import flix
from fedblend.compress import rand_k
from fedblend.data.datasets import quadratic_loss, quadratics
from fedblend.data.federated import federate
from fedblend.local import Work
from fedblend.mixing import Blend
from fedblend.simulation.simulate import simulate
from fedblend.transforms import diana

CLIENTS, DIM = 6, 4
FEDERATION, _ = quadratics(clients=CLIENTS, dim=DIM)
A, B = FEDERATION.train.examples
LOCAL = np.linalg.solve(A, B[..., None])[..., 0]
SMOOTH = np.linalg.eigvalsh(A).max(axis=1).astype(np.float32)
ALPHA = np.linspace(0.2, 0.9, CLIENTS)
KEY = jax.random.key(0)
dgd = partial(
    fedopt, work=Work(1.0, steps=1, batch_size=None), server_optimizer=optax.sgd(0.1)
)


def optimum(alpha):
    """min over x of 1/n sum f_i(alpha_i x + (1 - alpha_i) x_i), by a linear solve."""
    hessian = (alpha[:, None, None] ** 2 * A).mean(axis=0)
    pull = B - (1 - alpha)[:, None] * np.einsum("nij,nj->ni", A, LOCAL)
    return np.linalg.solve(hessian, (alpha[:, None] * pull).mean(axis=0))


def run(algorithm, rounds, federated_data=FEDERATION, dim=DIM, **settings):
    first = jnp.full(dim, 3.0)
    return simulate(
        algorithm, first, federated_data, KEY, rounds=rounds, **settings
    ).complete()


SOLVERS = {
    "gradient_descent": solvers.gradient_descent(
        quadratic_loss, SMOOTH, tolerance=1e-5
    ),
    "newton": solvers.newton(quadratic_loss, tolerance=1e-5),
    "lbfgs": solvers.lbfgs(quadratic_loss, tolerance=1e-5),
    "given": solvers.given(jnp.asarray(LOCAL)),
}
GIVEN = SOLVERS["given"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_optimum_of_the_mixture(solver):
    algorithm = flix(
        quadratic_loss, dgd, alpha=ALPHA, local=SOLVERS[solver], smooth=SMOOTH
    )
    found = run(algorithm, 1500)
    best = optimum(ALPHA)
    # float32 after 1500 steps, and local models to a gradient norm of 1e-5
    np.testing.assert_allclose(found.shared, best, atol=2e-5)
    client = found.client(2)
    np.testing.assert_allclose(client.personal, LOCAL[2], atol=2e-5)
    assert solver == "given" or client.norm <= 1e-5
    mixed = ALPHA[2] * best + (1 - ALPHA[2]) * LOCAL[2]
    np.testing.assert_allclose(found.personal(2), mixed, atol=2e-5)


def test_a_solver_that_is_cut_short_says_so():
    hasty = solvers.gradient_descent(quadratic_loss, SMOOTH, most=2)
    _, norm = hasty(jnp.full(DIM, 3.0), FEDERATION.train.shard(0), KEY)
    assert norm > 0.01


@pytest.mark.parametrize(("average", "power"), [("minimizer", 1), ("stationary", 2)])
def test_it_starts_at_the_weighted_average_and_counts_what_it_takes(average, power):
    algorithm = flix(
        quadratic_loss, dgd, alpha=ALPHA, local=GIVEN, smooth=SMOOTH, average=average
    )
    found = run(algorithm, 0)
    weights = (ALPHA**2 * SMOOTH) ** power
    expected = weights @ LOCAL / weights.sum()
    np.testing.assert_allclose(found.shared, expected, rtol=1e-5)
    # the initial parameters down; a weighted model and its weight up
    assert set(found.bits().down) == {32 * DIM}
    assert set(found.bits().up) == {32 * (DIM + 1)}


def test_alpha_1_is_the_wrapped_method():
    method = partial(fedavg, work=Work(0.05, steps=3, batch_size=None))
    algorithm = flix(quadratic_loss, method, alpha=1.0, local=GIVEN)
    found = run(algorithm, 5)
    plain = simulate(
        method(quadratic_loss),
        jnp.asarray(LOCAL.mean(axis=0), jnp.float32),
        FEDERATION,
        KEY,
        rounds=5,
        weights="uniform",
    )
    # the mixture 1 * shared + 0 * x_i is exact; x_avg is summed in another order
    np.testing.assert_allclose(found.shared, plain.shared, rtol=1e-5, atol=1e-6)


def test_alpha_0_is_purely_local():
    found = run(flix(quadratic_loss, dgd, alpha=0.0, local=GIVEN), 5)
    np.testing.assert_array_equal(found.shared, np.full(DIM, 3.0))
    np.testing.assert_array_equal(found.personal(1), LOCAL[1].astype(np.float32))


METHODS = {
    "accelerated": partial(
        fedopt,
        work=Work(1.0, steps=1, batch_size=None),
        server_optimizer=optax.sgd(0.05, momentum=0.8, nesterov=True),
    ),
    "without drift": partial(scaffold, work=Work(0.05, steps=4, batch_size=None)),
    "compressed": lambda loss: diana(
        fedavg(loss, Work(0.03, steps=1, batch_size=None)), rand_k(2), rate=0.5
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_any_method_for_finite_sums_solves_it(name):
    found = run(flix(quadratic_loss, METHODS[name], alpha=ALPHA, local=GIVEN), 3000)
    np.testing.assert_allclose(found.shared, optimum(ALPHA), atol=1e-4)


def test_local_steps_are_another_method():
    """FedAvg's drift moves the fixed point: more steps are not the same solver."""
    method = partial(fedavg, work=Work(0.1, steps=10, batch_size=None))
    found = run(flix(quadratic_loss, method, alpha=ALPHA, local=GIVEN), 1500)
    assert np.abs(found.shared - optimum(ALPHA)).max() > 1e-3


def test_a_sweep_over_alpha_is_one_run():
    values = jnp.array([0.3, 0.8])
    swept = run(
        lambda alpha: flix(quadratic_loss, dgd, alpha=alpha, local=GIVEN),
        1500,
        over=values,
    )
    for replica, alpha in enumerate([0.3, 0.8]):
        best = optimum(np.full(CLIENTS, alpha))
        np.testing.assert_allclose(swept.shared[replica], best, atol=2e-5)


@pytest.mark.slow
def test_outputs_can_be_mixed_instead():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(30, 3)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32)
    federated_data = federate((inputs, labels), np.split(np.arange(30), 3))
    model = models.logistic(3)
    loss = losses.l2(losses.logistic(model.apply), 0.1)
    algorithm = flix(
        loss,
        dgd,
        alpha=0.5,
        local=solvers.lbfgs(loss, tolerance=1e-4),
        mix=mixing.outputs,
    )
    found = simulate(algorithm, model.init, federated_data, KEY, rounds=50).complete()
    blend = found.personal(1)
    assert isinstance(blend, Blend)
    np.testing.assert_array_equal(
        blend.personal.weight, found.client(1).personal.weight
    )
    # a linear model's mixed outputs are the outputs of its mixed parameters
    plain = mixing.parameters(0.5, blend.shared, blend.personal)
    np.testing.assert_allclose(
        mixing.predict(model.apply, blend, inputs),
        model.apply(plain, inputs),
        rtol=1e-4,
        atol=1e-5,
    )


def test_patient_sgd_stops_and_keeps_the_best():
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(60, 3)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32)
    shard = federate((inputs, labels), [np.arange(60)]).train.shard(0)
    model = models.logistic(3)
    loss = losses.logistic(model.apply)
    solve = solvers.patient_sgd(loss, Work(0.5, steps=20, batch_size=8), turns=30)
    params, norm = solve(model.init(KEY), shard, KEY)
    scores = model.apply(params, inputs)
    assert ((scores > 0) == labels).mean() > 0.9
    assert 0 < norm < 0.2


def test_patient_sgd_trains_clients_of_few_rows():
    """One row is not held out, of two or more at least one is."""
    counts = np.array([1, 2, 3, 4])
    ends = np.cumsum(counts)
    rows = np.ones((ends[-1], 1), np.float32), np.full(ends[-1], 2.0, np.float32)
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    train = federate(rows, parts).train
    loss = losses.squared_error(lambda params, inputs: inputs @ params)
    solve = jax.jit(
        solvers.patient_sgd(loss, Work(0.5, steps=2, batch_size=2), patience=2, turns=9)
    )
    found = [solve(np.zeros(1), train.shard(client), KEY)[0] for client in range(4)]
    steps = np.array([4, 18, 18, 18])  # each of which halves the gap
    np.testing.assert_allclose(np.ravel(found), 2 - 2 * 0.5**steps, rtol=1e-6)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, np.array([0.5, 2.0])])
def test_alpha_outside_0_and_1(alpha):
    with pytest.raises(ValueError, match=r"alpha: .* is not in \[0, 1\]"):
        flix(quadratic_loss, dgd, alpha=alpha, local=GIVEN)


def test_an_unknown_average():
    with pytest.raises(ValueError, match="average: 'mode' is not 'minimizer'"):
        flix(quadratic_loss, dgd, alpha=0.5, local=GIVEN, average="mode")
