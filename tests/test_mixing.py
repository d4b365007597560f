# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fedblend import mixing
from fedblend.core import Batch
from fedblend.losses import cross_entropy, gradient, objective
from fedblend.models import mlp, softmax

MODEL = mlp(3, 2, hidden=(4,), activation="tanh")
SHARED, PERSONAL = (MODEL.init(jax.random.key(seed)) for seed in (0, 1))
INPUTS = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
LABELS = jnp.array([0, 1, 1, 0, 1, 0])


def equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("mix", [mixing.parameters, mixing.outputs])
def test_alpha_is_the_weight_of_the_shared_model(mix):
    def predicted(alpha):
        return mixing.predict(MODEL.apply, mix(alpha, SHARED, PERSONAL), INPUTS)

    np.testing.assert_array_equal(predicted(1.0), MODEL.apply(SHARED, INPUTS))
    np.testing.assert_array_equal(predicted(0.0), MODEL.apply(PERSONAL, INPUTS))


def test_parameters_are_mixed_leaf_by_leaf():
    mixed = mixing.parameters(0.25, SHARED, PERSONAL)
    assert jax.tree.structure(mixed) == jax.tree.structure(SHARED)
    expected = jax.tree.map(lambda s, p: 0.25 * s + 0.75 * p, SHARED, PERSONAL)
    equal(mixed, expected)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(mixed))


def test_a_part_alone_is_mixed():
    some, every, none = (
        mixing.only(which)(jnp.float32(0.25), SHARED, PERSONAL)
        for which in (["last"], lambda path: True, lambda path: False)
    )
    equal(every, mixing.parameters(0.25, SHARED, PERSONAL))
    equal(none, SHARED)
    equal(some.last, every.last)
    equal(some.hidden, SHARED.hidden)


def test_outputs_are_mixed_after_the_models():
    blend = mixing.outputs(0.25, SHARED, PERSONAL)
    mixed = mixing.predict(MODEL.apply, blend, INPUTS)
    ours, own = MODEL.apply(SHARED, INPUTS), MODEL.apply(PERSONAL, INPUTS)
    np.testing.assert_allclose(mixed, 0.25 * ours + 0.75 * own, rtol=1e-6)
    plain = mixing.parameters(0.25, SHARED, PERSONAL)
    assert not np.allclose(mixed, mixing.predict(MODEL.apply, plain, INPUTS))


def test_both_mixtures_agree_where_the_model_is_linear():
    model = softmax(3, 2)
    zero = model.init(jax.random.key(0))
    shared = jax.tree.map(lambda leaf: leaf + 1, zero)
    personal = jax.tree.map(lambda leaf: leaf - 2, zero)
    one, other = (
        mixing.predict(model.apply, mix(0.3, shared, personal), INPUTS)
        for mix in (mixing.parameters, mixing.outputs)
    )
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_gradients_through_the_mixture_carry_alpha():
    loss = cross_entropy(MODEL.apply)
    batch = Batch((INPUTS, LABELS))

    def mixed(alpha, shared, personal):
        return objective(loss, mixing.parameters(alpha, shared, personal), batch)

    alpha = 0.3
    at_mixture = jax.jit(gradient(loss))(
        mixing.parameters(alpha, SHARED, PERSONAL), batch
    )
    gradients = jax.jit(jax.grad(mixed, argnums=(1, 2)))
    in_shared, in_personal = gradients(alpha, SHARED, PERSONAL)
    for got, factor in ((in_shared, alpha), (in_personal, 1 - alpha)):
        expected = jax.tree.map(lambda leaf, f=factor: f * leaf, at_mixture)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), got, expected
        )


@pytest.mark.parametrize("mix", [mixing.parameters, mixing.outputs])
def test_gradients_by_finite_differences(mix):
    with jax.enable_x64(True):
        shared, personal, inputs = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)),
            (SHARED, PERSONAL, INPUTS),
        )
        loss = cross_entropy(MODEL.apply)

        def mixed(alpha, shared, personal):
            model = mix(alpha, shared, personal)
            return objective(loss, model, Batch((inputs, LABELS)))

        args = (jnp.float64(0.3), shared, personal)
        check_grads(jax.jit(mixed), args, order=1, modes=["rev"], rtol=1e-6)
