# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from fedblend.core import Shard
from fedblend.errors import InputError
from fedblend.local import Work, descend
from fedblend.losses import cross_entropy, gradient
from fedblend.models import from_equinox, from_flax, from_keras

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


@pytest.mark.slow
@pytest.mark.parametrize("framework", ADAPTED)
def test_adapted_modules_train(framework):
    convert, source = ADAPTED[framework]
    model = convert(source, dropout="off")
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
    convert, source = ADAPTED[framework]
    model = convert(source, dropout="off")
    many = jax.jit(jax.vmap(model.init))(jax.random.split(KEY, 3))
    outputs = jax.jit(jax.vmap(model.apply, in_axes=(0, None)))(many, INPUTS)
    assert outputs.shape == (3, 40, 2)
    assert not np.allclose(outputs[0], outputs[1])


def test_flax_parameters_are_named_and_agree_with_the_module():
    model = from_flax(FlaxNet, dropout="off")
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
    model = from_equinox(EquinoxNet, dropout="off")
    params = model.init(KEY)
    assert {"layers/0/weight", "norm/weight"} < set(params)
    module = equinox.nn.inference_mode(EquinoxNet(KEY))
    expected = jax.vmap(module)(INPUTS)
    np.testing.assert_allclose(model.apply(params, INPUTS), expected, rtol=1e-6)


def test_a_module_given_as_such_keeps_its_parameters():
    flax_module = FlaxNet(nnx.Rngs(3))
    params = from_flax(flax_module, dropout="off").init(KEY)
    np.testing.assert_array_equal(params["first/kernel"], flax_module.first.kernel[...])
    assert not flax_module.dropout.deterministic  # the user's own stays as it was
    equinox_module = EquinoxNet(jax.random.key(3))
    params = from_equinox(equinox_module, dropout="off").init(KEY)
    original = equinox_module.layers[0].weight
    np.testing.assert_array_equal(params["layers/0/weight"], original)


@pytest.mark.parametrize(
    ("convert", "source", "message"),
    [
        (from_flax, FlaxBatchNormNet, "FlaxBatchNormNet has a BatchStat at norm/mean"),
        (from_equinox, EquinoxBatchNormNet, "EquinoxBatchNormNet has state"),
        (
            from_equinox,
            equinox.nn.make_with_state(EquinoxBatchNormNet),
            "EquinoxBatchNormNet has state",
        ),
    ],
)
def test_batch_statistics_are_refused_in_one_line(convert, source, message):
    with pytest.raises(ValueError, match=message) as caught:
        convert(source, dropout="off")
    assert "LayerNorm" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("framework", ADAPTED)
def test_dropout_is_not_switched_off_silently(framework):
    convert, source = ADAPTED[framework]
    with pytest.raises(InputError, match=r'uses dropout, at dropout; .*dropout="off"'):
        convert(source)
    with pytest.raises(InputError, match=r'dropout: 0.5 is not "off" or None'):
        convert(source, dropout=0.5)


@pytest.mark.parametrize("framework", ADAPTED)
def test_modules_of_others_are_refused_in_one_line(framework):
    convert, _ = ADAPTED[framework]
    layer = torch.nn.Linear(5, 2)
    for wrong in (layer, torch.nn.Linear, lambda key: layer):
        with pytest.raises(InputError, match=r"of PyTorch; fb.models.from_torch t"):
            convert(wrong)
    with pytest.raises(InputError, match=r"an int is not a module"):
        convert(3)
    with pytest.raises(InputError, match=r"returns an int is not a module"):
        convert(lambda key: 3)


KERAS = """
import jax, keras, numpy as np
from fedblend.models import from_keras
layers = keras.layers
def shown(*parts, **options):
    try:
        return from_keras(keras.Sequential(parts), **options)
    except ValueError as error:
        print(error)
start, drop = keras.Input((4,)), layers.Dropout(0.5)
shown(start, drop, layers.Dense(2))
shown(start, layers.BatchNormalization())
shown(layers.Dense(2))
net = keras.Sequential([start, layers.Dense(3, "relu"), drop, layers.Dense(2)])
model = from_keras(net, dropout="off")
params, rows = model.init(jax.random.key(0)), np.ones((3, 4), np.float32)
gap = np.abs(model.apply(params, rows) - np.asarray(net(rows))).max()
slope = jax.jit(jax.grad(lambda own: model.apply(own, rows).sum()))(params)
print(gap < 1e-6, len(slope), np.asarray(slope["sequential_3/dense_3/bias"]).tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not here")
def test_keras_models_with_the_backend_jax():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERAS],
        env={**os.environ, "KERAS_BACKEND": "jax"},  # read when Keras is imported
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert "uses dropout, at dropout" in lines[0]
    assert "has state at" in lines[1] and "LayerNorm" in lines[1]
    assert "has no weights yet" in lines[2]
    assert lines[3] == "True 4 [3.0, 3.0]"


def test_keras_with_another_backend_is_refused(monkeypatch):
    backend = SimpleNamespace(backend=lambda: "torch")
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(backend=backend))
    with pytest.raises(InputError, match="backend of Keras is torch; set the environ"):
        from_keras(None)
