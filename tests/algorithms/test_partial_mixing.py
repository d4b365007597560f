# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX and APFL that mix a part of the model alone, ``mix=["head"]``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import mixing

KEY, RATE, ALPHA, SPLIT = jax.random.key(3), 0.2, 0.4, 2
on = problems.quadratics()
PARAMS = {"body": on.params[:SPLIT], "head": on.params[SPLIT:]}
MATRICES, VECTORS = problems.client_matrices(on)
FULL = fb.Work(RATE, steps=1, batch_size=None)


def loss(params, rows):
    return on.loss(jnp.concatenate([params["body"], params["head"]]), rows)


def flix(mix):
    def method(mixed):
        return fb.fedavg(mixed, FULL)

    return fb.flix(loss, method, alpha=ALPHA, local=fb.solvers.newton(loss), mix=mix)


def apfl(mix):
    return fb.apfl(loss, FULL, alpha=ALPHA, mix=mix)


def complete(algorithm, rounds=3):
    run = fb.simulate(
        algorithm,
        PARAMS,
        on.federated_data,
        KEY,
        rounds=rounds,
        every=rounds,
        weights="uniform",
    )
    return run.complete()


def joined(model):
    return np.concatenate([model["body"], model["head"]])


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.slow
@pytest.mark.parametrize("build", [flix, apfl])
def test_with_every_path_it_is_the_plain_mixture_and_with_none_the_shared_model(build):
    plain, every, none = (
        complete(build(mix))
        for mix in (
            mixing.parameters,
            ["body", "head"],
            mixing.only(lambda path: False),
        )
    )
    same(every.shared, plain.shared)
    same(every.personal(4), plain.personal(4))
    same(none.personal(4), none.shared)
    if build is apfl:
        same(none.shared, complete(fb.fedavg(loss, FULL)).shared)


def test_flix_of_a_part_ends_where_its_equations_say():
    """With D = diag(1, 1, alpha) and c_i = (1 - alpha) x_i in the head and else 0::

    sum_i D (A_i (D x + c_i) - b_i) = 0,      personal_i = D x + c_i
    """
    run = complete(flix(["head"]), rounds=300)
    scale = np.diag([1, 1, ALPHA])
    own = np.linalg.solve(MATRICES, VECTORS[..., None])[..., 0]
    own[:, :SPLIT] = 0
    own *= 1 - ALPHA
    matrix = scale @ MATRICES.sum(axis=0) @ scale
    right = scale @ (VECTORS - np.einsum("nij,nj->ni", MATRICES, own)).sum(axis=0)
    wanted = np.linalg.solve(matrix, right)
    np.testing.assert_allclose(joined(run.shared), wanted, rtol=0, atol=1e-5)
    for client in range(7):
        model = scale @ wanted + own[client]
        np.testing.assert_allclose(joined(run.personal(client)), model, atol=1e-5)


def test_apfl_of_a_part_learns_that_part_and_alpha_from_it():
    """Two rounds of one step, by hand."""
    run = complete(apfl(["head"]), rounds=2)
    shared = np.array(on.params, np.float64)
    own, alphas = np.tile(shared, (7, 1)), np.full(7, ALPHA)
    for _ in range(2):
        steps = []
        for i, (matrix, vector) in enumerate(zip(MATRICES, VECTORS, strict=True)):
            mixture = shared.copy()
            mixture[SPLIT:] *= alphas[i]
            mixture[SPLIT:] += (1 - alphas[i]) * own[i, SPLIT:]
            push = (matrix @ mixture - vector)[SPLIT:]
            apart = shared[SPLIT:] - own[i, SPLIT:]
            own[i, SPLIT:] -= RATE * (1 - alphas[i]) * push
            alphas[i] = np.clip(alphas[i] - RATE * apart @ push, 0, 1)
            steps.append(matrix @ shared - vector)
        shared = shared - RATE * np.mean(steps, axis=0)
    assert np.abs(alphas - ALPHA).max() > 1e-3
    states = run.client_states()
    np.testing.assert_allclose(states.alpha, alphas, rtol=1e-5)
    np.testing.assert_allclose(states.personal["head"], own[:, SPLIT:], rtol=1e-5)
    same(states.personal["body"], np.tile(PARAMS["body"], (7, 1)))
    np.testing.assert_allclose(joined(run.shared), shared, rtol=1e-5)
