# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX is a finite sum like any other: acceleration and variance reduction do on it
what they do elsewhere. Optima are linear solves, in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
from fedblend import compress
from fedblend.data.datasets.built_in import quadratic_loss

KEY = jax.random.key(0)
ALPHA = np.array([0.9, 0.4, 0.7, 1.0, 0.2])
CLIENTS = len(ALPHA)


class Mixed:
    """f~ of clients with mean matrices A_i and vectors b_i."""

    def __init__(self, matrices, vectors):
        self.own = np.linalg.solve(matrices, vectors[..., None])[..., 0]
        weight = ALPHA[:, None, None] ** 2 / CLIENTS
        self.hessian = (weight * matrices).sum(axis=0)
        pull = (weight * matrices) @ self.own[..., None]
        self.best = np.linalg.solve(self.hessian, pull.sum(axis=0)[:, 0])

    def gap(self, x) -> float:
        """f~(x) - min f~."""
        away = np.asarray(x, float) - self.best
        return float(away @ self.hessian @ away / 2)


def flix(method, own, smooth=1.0):
    given = fb.solvers.given(jnp.asarray(own, jnp.float32))
    return fb.flix(quadratic_loss, method, alpha=ALPHA, local=given, smooth=smooth)


def ill_conditioned(kappa: float, dim=6, seed=0):
    """Clients with L_i = 1 whose f~ has the condition number kappa exactly."""
    rng = np.random.default_rng(seed)
    curves = np.geomspace(1, 1 / kappa, dim) * np.ones((CLIENTS, 1))
    curves[:, 1:] *= rng.uniform(0.5, 1.5, (CLIENTS, dim - 1))
    share = ALPHA**2 / (ALPHA**2).sum()
    curves[:, -1] /= kappa * (share @ curves[:, -1])
    axes, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    matrices = np.einsum("ij,cj,kj->cik", axes, curves, axes)
    own = rng.standard_normal((CLIENTS, dim)) * 3
    vectors = (matrices @ own[..., None])[..., 0]
    parts = np.split(np.arange(CLIENTS), CLIENTS)
    federated_data = fb.federate((matrices, vectors), parts)
    return federated_data, Mixed(matrices, vectors)


def rounds_until(algorithm, federated_data, mixed, goal, every, most) -> int:
    run = fb.simulate(
        algorithm,
        jnp.zeros(len(mixed.best)),
        federated_data,
        KEY,
        rounds=most,
        every=every,
    )
    for record in run:
        if mixed.gap(run.shared) <= goal:
            return record.round
    raise AssertionError(f"{mixed.gap(run.shared)} after {most} rounds")


def needed(kappa: float) -> tuple[int, int]:
    """Rounds to 1e-8 of gradient descent, and of its accelerated form."""
    federated_data, mixed = ill_conditioned(kappa)
    rate = float(1 / np.mean(ALPHA**2))  # 1/L_alpha, as all L_i are 1
    root = np.sqrt(kappa)
    momentum = float((root - 1) / (root + 1))
    nesterov = optax.sgd(1.0, momentum=momentum, nesterov=True)

    def plain(loss):
        return fb.fedavg(loss, fb.Work(rate, steps=1, batch_size=None))

    def accelerated(loss):
        return fb.algorithms.fedopt(
            loss, fb.Work(rate, steps=1, batch_size=None), nesterov
        )

    slow, fast = (
        rounds_until(
            flix(method, mixed.own), federated_data, mixed, 1e-8, every, 20_000
        )
        for method, every in ((plain, 10), (accelerated, 2))
    )
    return slow, fast


@pytest.mark.slow
def test_accelerated_descent_needs_about_the_root_of_the_condition_number():
    """Descent pays kappa/2 log(1/gap), Nesterov's method about its root."""
    few, many = needed(36.0), needed(900.0)
    assert few[1] < few[0] / 2
    assert many[1] < many[0] / 8
    assert 12 < many[0] / few[0] < 40  # kappa grew by 25
    assert 3 < many[1] / few[1] < 8  # its root by 5


def rows_that_differ(rows=8, dim=3, seed=1):
    """Several rows for each client, so that batches of one are noisy."""
    rng = np.random.default_rng(seed)
    total = CLIENTS * rows
    axes, _ = np.linalg.qr(rng.standard_normal((total, dim, dim)))
    curves = rng.uniform(0.5, 2, (total, 1, dim))
    matrices = (axes * curves) @ axes.swapaxes(1, 2)
    vectors = rng.standard_normal((total, dim))
    parts = np.split(np.arange(total), CLIENTS)
    federated_data = fb.federate((matrices, vectors), parts)
    means = [federated_data.train.rows(client) for client in range(CLIENTS)]
    mixed = Mixed(
        np.stack([matrices.mean(axis=0) for matrices, _ in means]),
        np.stack([vectors.mean(axis=0) for _, vectors in means]),
    )
    return federated_data, mixed


RATE = 0.3
METHODS = {
    "sgd": lambda loss: fb.fedavg(loss, fb.Work(RATE, steps=1, batch_size=1)),
    "scaffold": lambda loss: fb.scaffold(loss, fb.Work(RATE, steps=1, batch_size=1)),
    "svrg": lambda loss: fb.algorithms.svrg(
        loss, fb.Work(RATE, steps=1, batch_size=1), refresh=0.125
    ),
    "compressed svrg": lambda loss: fb.transforms.diana(
        fb.algorithms.svrg(loss, fb.Work(RATE, steps=1, batch_size=1), refresh=0.125),
        compress.rand_k(2),
    ),
}


def reached(name, rounds=1500, cohort=None) -> float:
    federated_data, mixed = rows_that_differ()
    run = fb.simulate(
        flix(METHODS[name], mixed.own),
        jnp.zeros(3),
        federated_data,
        KEY,
        rounds=rounds,
        every=rounds,
        cohort=cohort,
    )
    return float(np.abs(run.shared - mixed.best).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "scaffold"])
def test_minibatches_alone_stall_and_control_variates_of_clients_do_not_help(name):
    assert reached(name) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["svrg", "compressed svrg"])
def test_svrg_reaches_the_exact_optimum_at_the_same_rate(name):
    """In float32: the optimum has entries of size 1."""
    assert reached(name) < 3e-6


def test_full_batches_are_gradient_descent():
    federated_data, mixed = rows_that_differ()

    def end(method):
        run = fb.simulate(
            flix(method, mixed.own),
            jnp.zeros(3),
            federated_data,
            KEY,
            rounds=5,
            every=5,
        )
        return run.shared

    np.testing.assert_allclose(
        end(
            lambda f: fb.algorithms.svrg(
                f, fb.Work(RATE, steps=2, batch_size=None), refresh=0.5
            )
        ),
        end(lambda f: fb.fedavg(f, fb.Work(RATE, steps=2, batch_size=None))),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("refresh", [0.0, 1.5, -1])
def test_an_anchor_that_never_moves_is_refused(refresh):
    with pytest.raises(ValueError, match=r"refresh: .* is not in .0, 1"):
        fb.algorithms.svrg(
            quadratic_loss, fb.Work(0.1, steps=1, batch_size=1), refresh=refresh
        )
