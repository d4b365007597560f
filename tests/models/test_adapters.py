# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedblend.core import Shard
from fedblend.local import Work, descend
from fedblend.losses import cross_entropy, gradient
from fedblend.models import from_equinox, from_flax

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.normal(size=(40, 5)), jnp.float32)
LABELS = jnp.asarray(INPUTS[:, 0] > 0, jnp.int32)
SHARD = Shard((INPUTS, LABELS), jnp.int32(0), jnp.int32(40), jnp.int32(0), 40)


class FlaxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(5, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, inputs):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(inputs)))))


class FlaxBatchNormNet(FlaxNet):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)


class EquinoxNet(equinox.Module):
    layers: list
    dropout: equinox.nn.Dropout
    norm: equinox.nn.LayerNorm

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.layers = [
            equinox.nn.Linear(5, 8, key=one),
            equinox.nn.Linear(8, 2, key=two),
        ]
        self.dropout = equinox.nn.Dropout(0.5)
        self.norm = equinox.nn.LayerNorm(8)

    def __call__(self, row):
        hidden = jax.nn.relu(self.norm(self.layers[0](row)))
        return self.layers[1](self.dropout(hidden))


class EquinoxBatchNormNet(equinox.Module):
    norm: equinox.nn.BatchNorm

    def __init__(self, key):
        self.norm = equinox.nn.BatchNorm(5, "batch", mode="batch")


ADAPTED = {"flax": (from_flax, FlaxNet), "equinox": (from_equinox, EquinoxNet)}


@pytest.mark.parametrize("framework", ADAPTED)
def test_adapted_modules_train(framework):
    adapter, source = ADAPTED[framework]
    model = adapter(source)
    loss = cross_entropy(model.apply)
    params = model.init(KEY)
    trained, mean_gradient = descend(
        gradient(loss),
        params,
        SHARD,
        KEY,
        work=Work(optimizer=0.5, steps=30, batch_size=10),
    )
    before, after = (loss(p, (INPUTS, LABELS)).mean() for p in (params, trained))
    assert after < 0.5 * before
    assert jax.tree.structure(mean_gradient) == jax.tree.structure(params)


@pytest.mark.parametrize("framework", ADAPTED)
def test_init_depends_on_the_key_and_can_be_mapped(framework):
    adapter, source = ADAPTED[framework]
    model = adapter(source)
    many = jax.jit(jax.vmap(model.init))(jax.random.split(KEY, 3))
    outputs = jax.jit(jax.vmap(model.apply, in_axes=(0, None)))(many, INPUTS)
    assert outputs.shape == (3, 40, 2)
    assert not np.allclose(outputs[0], outputs[1])


def test_flax_parameters_are_named_and_agree_with_the_module():
    model = from_flax(FlaxNet)
    module = FlaxNet(nnx.Rngs(KEY))
    params = model.init(KEY)
    assert set(params) == {
        f"{layer}/{leaf}"
        for layer, leaf in [
            ("first", "bias"),
            ("first", "kernel"),
            ("last", "bias"),
            ("last", "kernel"),
            ("norm", "bias"),
            ("norm", "scale"),
        ]
    }
    module.eval()
    np.testing.assert_allclose(model.apply(params, INPUTS), module(INPUTS), rtol=1e-6)


def test_equinox_parameters_are_named_and_agree_with_the_module():
    model = from_equinox(EquinoxNet)
    params = model.init(KEY)
    assert {"layers/0/weight", "norm/weight"} < set(params)
    module = equinox.nn.inference_mode(EquinoxNet(KEY))
    expected = jax.vmap(module)(INPUTS)
    np.testing.assert_allclose(model.apply(params, INPUTS), expected, rtol=1e-6)


def test_a_module_given_as_such_keeps_its_parameters():
    flax_module = FlaxNet(nnx.Rngs(3))
    params = from_flax(flax_module).init(KEY)
    np.testing.assert_array_equal(params["first/kernel"], flax_module.first.kernel[...])
    assert not flax_module.dropout.deterministic  # the user's own stays as it was
    equinox_module = EquinoxNet(jax.random.key(3))
    params = from_equinox(equinox_module).init(KEY)
    original = equinox_module.layers[0].weight
    np.testing.assert_array_equal(params["layers/0/weight"], original)


@pytest.mark.parametrize(
    ("adapter", "source", "message"),
    [
        (from_flax, FlaxBatchNormNet, "FlaxBatchNormNet has BatchNorm's batch stat"),
        (from_equinox, EquinoxBatchNormNet, "EquinoxBatchNormNet has state"),
        (
            from_equinox,
            equinox.nn.make_with_state(EquinoxBatchNormNet),
            "EquinoxBatchNormNet has state",
        ),
    ],
)
def test_batch_statistics_are_refused_in_one_line(adapter, source, message):
    with pytest.raises(ValueError, match=message) as caught:
        adapter(source)
    assert "LayerNorm" in str(caught.value) and "\n" not in str(caught.value)
