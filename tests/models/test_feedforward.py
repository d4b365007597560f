# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Our convolution and pooling against XLA's own, and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from fedblend.models.feedforward import Kernel, cnn, convolve, pool

RNG = np.random.default_rng(0)


def reference_convolution(layer, images):
    outputs = lax.conv_general_dilated(
        images,
        layer.weight,
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return outputs + layer.bias.reshape(1, 1, 1, -1)


def reference_pooling(images):
    window = (1, 2, 2, 1)
    return lax.reduce_window(images, -jnp.inf, lax.max, window, window, "VALID")


def layer_of(*shape):
    return Kernel(jnp.asarray(RNG.normal(size=shape)), jnp.asarray(RNG.normal(size=2)))


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 5), (2, 4)])
def test_convolution_is_the_reference_and_so_is_its_gradient(kernel):
    with jax.enable_x64(True):
        layer = layer_of(*kernel, 3, 2)
        images = jnp.asarray(RNG.normal(size=(4, 9, 7, 3)))
        np.testing.assert_allclose(
            jax.jit(convolve)(layer, images),
            reference_convolution(layer, images),
            atol=1e-12,
        )

        def total(convolution):
            return lambda *args: jnp.sin(convolution(*args)).sum()

        def gradients(convolution):
            return jax.jit(jax.grad(total(convolution), argnums=(0, 1)))

        ours = gradients(convolve)(layer, images)
        theirs = gradients(reference_convolution)(layer, images)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), ours, theirs
        )


@pytest.mark.parametrize("size", [(6, 8), (5, 7), (2, 3)])
def test_pooling_is_the_reference_and_so_is_its_gradient(size):
    images = jnp.asarray(RNG.normal(size=(3, *size, 2)), jnp.float32)
    np.testing.assert_array_equal(pool(images), reference_pooling(images))
    ours = jax.grad(lambda images: jnp.square(pool(images)).sum())(images)
    theirs = jax.grad(lambda images: jnp.square(reference_pooling(images)).sum())(
        images
    )
    np.testing.assert_array_equal(ours, theirs)


def test_gradients_by_finite_differences():
    with jax.enable_x64(True):
        images = jnp.asarray(RNG.normal(size=(2, 6, 6, 1)))

        def network(layer, images):
            return jnp.tanh(pool(convolve(layer, images)))

        layer = layer_of(3, 3, 1, 2)
        check_grads(
            jax.jit(network), (layer, images), order=1, modes=["rev"], rtol=1e-6
        )


def test_the_whole_network_is_the_reference():
    model = cnn((16, 18, 2), 3)
    params = jax.jit(model.init)(jax.random.key(1))
    images = jnp.asarray(RNG.normal(size=(4, 16, 18, 2)), jnp.float32)
    here = images
    for layer in (params.first, params.second):
        here = reference_pooling(jax.nn.relu(reference_convolution(layer, here)))
    here = jax.nn.relu(here.reshape(4, -1) @ params.hidden.weight.T)
    expected = here @ params.last.weight.T
    # Summed in another order: float32 rounding of sums over 500 terms.
    outputs = jax.jit(model.apply)(params, images)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)


def test_clients_mapped_together_are_clients_alone():
    model = cnn((16, 16), 3)
    params = jax.jit(jax.vmap(model.init))(jax.random.split(jax.random.key(0), 3))
    images = jnp.asarray(RNG.normal(size=(3, 2, 16, 16)), jnp.float32)
    together = jax.jit(jax.vmap(model.apply))(params, images)
    apply = jax.jit(model.apply)
    for client in range(3):
        own = jax.tree.map(lambda leaf, i=client: leaf[i], params)
        alone = apply(own, images[client])
        np.testing.assert_allclose(together[client], alone, atol=1e-5)
