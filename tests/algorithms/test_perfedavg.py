# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg: its direction against autodiff and differences, its ends, its limit."""

from functools import cache, partial
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.core import Batch
from fedblend.losses import gradient, objective

INNER, RATE = 0.3, 0.2
DELTAS = (0.1, 0.01, 0.001)
KEY = jax.random.key(2)
full: dict[str, Any] = {"steps": 1, "batch_size": None}
noisy: dict[str, Any] = {"steps": 3, "batch_size": 2}
curved = problems.classes()
SHARD = jax.device_put(curved.federated_data.train.shard(4))


def told(correction=None):
    """In float64, where JAX has it."""
    weight = jnp.asarray(np.linspace(-1, 1, 6).reshape(2, 3))
    params = problems.Linear(weight, jnp.asarray([0.1, 0.0, -0.2]))
    return fb.Down(params, jnp.zeros((), jnp.int32), correction)


def answer(down, build=fb.algorithms.perfedavg, **settings) -> Any:
    """A client's answer, its trees as flat arrays."""
    work = fb.Work(RATE, settings.pop("steps"), settings.pop("batch_size"))
    up, _ = build(curved.loss, work, **settings).client(down, (), SHARD, KEY)
    flat = [jax.flatten_util.ravel_pytree(tree)[0] for tree in up[:2]]
    return fb.Up(flat[0], flat[1])


def after_one_step(params):
    """F_i(w) = f_i(w - a grad f_i(w)) on all rows of the client."""
    own = Batch(curved.federated_data.train.rows(4))
    mean_gradient = gradient(curved.loss)(params, own)
    moved = jax.tree.map(lambda w, g: w - INNER * g, params, mean_gradient)
    return objective(curved.loss, moved, own)


@cache
def answers() -> dict[str, Any]:
    """All answers that are compared, compiled at once."""

    @jax.jit
    def given(deltas):
        down, zero = told(), partial(answer, told(), inner_rate=0.0, **noisy)
        meta = partial(answer, inner_rate=INNER, **full)
        push = jax.tree.map(jnp.ones_like, down.shared)
        point, unravel = jax.flatten_util.ravel_pytree(down.shared)
        steps = 1e-5 * jnp.eye(point.size)

        def difference(step):
            ends = (after_one_step(unravel(point + sign * step)) for sign in (1, -1))
            ahead, behind = ends
            return (ahead - behind) / 2e-5

        return {
            "exact": meta(down),
            "none": meta(down, hessian="none"),
            "differences": jax.vmap(
                lambda delta: (
                    meta(down, hessian="differences", delta=delta).mean_gradient
                )
            )(deltas),
            "corrected": meta(told(push)),
            "autodiff": jax.flatten_util.ravel_pytree(
                jax.grad(after_one_step)(down.shared)
            )[0],
            "by differences": jax.vmap(difference)(steps),
            "fomaml": answer(
                down,
                lambda loss, work: fb.algorithms.fomaml(
                    loss, work._replace(optimizer=INNER), work.optimizer
                ),
                **full,
            ),
            "zero": [zero(hessian=name) for name in ("exact", "differences", "none")],
            "fedavg": answer(down, fb.fedavg, **noisy),
        }

    with jax.enable_x64(True):
        return jax.device_get(given(jnp.asarray(DELTAS)))


def close(left, right):
    """The same sums in float64, in another order."""
    np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-13)


def test_the_exact_direction_is_the_gradient_of_the_loss_after_one_step():
    mean_gradient = answers()["exact"].mean_gradient
    close(mean_gradient, answers()["autodiff"])
    # central differences of step h are good to h^2 times a third derivative
    np.testing.assert_allclose(
        mean_gradient, answers()["by differences"], rtol=0, atol=1e-8
    )
    assert np.abs(mean_gradient - answers()["none"].mean_gradient).max() > 0.01


def test_differences_approach_the_exact_product_as_the_square_of_delta():
    gaps = np.abs(answers()["differences"] - answers()["exact"].mean_gradient).max(
        axis=1
    )
    assert gaps[0] > 1e-4
    np.testing.assert_allclose(gaps[1:], gaps[:-1] / 100, rtol=0.1)


def test_without_the_hessian_one_step_is_fomaml():
    close(answers()["none"].mean_gradient, answers()["fomaml"].mean_gradient)
    # FOMAML says the gradient, of which the server takes RATE; here the step was taken
    close(answers()["none"].delta, RATE * answers()["fomaml"].delta)


@pytest.mark.parametrize("form", [0, 1, 2])
def test_an_inner_rate_of_nothing_is_fedavg(form):
    """On FedAvg's own batches."""
    close(answers()["zero"][form].delta, answers()["fedavg"].delta)
    assert np.abs(answers()["fedavg"].delta).max() > 0.1


def test_a_nudge_is_added_to_the_gradient_after_the_step():
    plain, pushed = answers()["exact"], answers()["corrected"]
    close(plain.mean_gradient, pushed.mean_gradient)
    close(pushed.delta, plain.delta - RATE)


on = problems.quadratics()
RATES = [0.0, 0.2]
"""Inner rates of a sweep; at 0 the limit is FedAvg's."""


@cache
def limits():
    return fb.simulate(
        lambda rate: fb.algorithms.perfedavg(
            on.loss, fb.Work(0.4, **full), inner_rate=rate
        ),
        on.params,
        on.federated_data,
        KEY,
        rounds=200,
        every=200,
        over=jnp.asarray(RATES, jnp.float32),
    ).complete()


@pytest.mark.parametrize("replica", [0, 1])
def test_it_ends_at_the_minimizer_of_the_mean_loss_after_one_step(replica):
    """On quadratics, with J = I - a A: mean J A J w = mean J J b."""
    matrices, vectors = problems.client_matrices(on)
    shares = on.federated_data.train.counts / on.federated_data.train.counts.sum()
    rate, one = RATES[replica], np.eye(3)
    after = one - rate * matrices
    left = np.einsum("n,nij,njk,nkl->il", shares, after, matrices, after)
    right = np.einsum("n,nij,njk,nk->i", shares, after, after, vectors)
    wanted = np.linalg.solve(left, right)
    np.testing.assert_allclose(limits().shared[replica], wanted, rtol=0, atol=5e-6)
    drift = np.abs(wanted - problems.optimum(on, "by_count")).max()
    assert drift > 1e-3 if replica else drift < 1e-12
    for client in range(7):
        model = wanted - rate * (matrices[client] @ wanted - vectors[client])
        found = limits().personal(client)[replica]
        np.testing.assert_allclose(found, model, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"hessian": "full"}, "hessian: 'full' is not 'exact', 'diff"),
        (
            {"hessian": "differences", "delta": 0.0},
            "delta: 0.0 is not a number above",
        ),
    ],
)
def test_hessians_without_a_meaning_are_refused(settings, line):
    with pytest.raises(ValueError, match=line):
        fb.algorithms.perfedavg(
            on.loss, fb.Work(0.1, **full), inner_rate=0.1, **settings
        )
