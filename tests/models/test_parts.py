# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of models of the package and of three frameworks, found by what they do."""

import equinox
import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import fedblend as fb
from fedblend.errors import SettingError
from fedblend.models import find_part


class FlaxNet(nnx.Module):
    """Its last layer comes first in the alphabet, and after the first one here."""

    def __init__(self, rngs):
        self.wide = nnx.Linear(4, 8, rngs=rngs)
        self.a_last = nnx.Linear(8, 3, rngs=rngs)
        self.middle = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.a_last(nnx.relu(self.middle(self.wide(x))))


class EquinoxNet(equinox.Module):
    layers: list

    def __init__(self, key):
        linear, norm = equinox.nn.Linear, equinox.nn.LayerNorm
        self.layers = [linear(4, 8, key=key), norm(8), linear(8, 3, key=key)]

    def __call__(self, x):
        first, norm, last = self.layers
        return last(jax.nn.relu(norm(first(x))))


def torch_net(norm, **options):
    nn = torch.nn
    body = [nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 6)]
    net = nn.Sequential(*body, *(nn.ReLU() for _ in range(6)), nn.Linear(6, 3))
    return fb.models.from_torch(net, torch.zeros(2, 1, 8, 8), **options)


FLAT, IMAGE = jnp.ones((2, 4)), jnp.ones((2, 1, 8, 8))
MODELS = {
    "mlp": (
        lambda: fb.models.mlp(4, 3, hidden=(5,), norm=True),
        FLAT,
        ["last/bias", "last/weight"],
        ["norm/0/offset", "norm/0/scale"],
    ),
    "flax": (
        lambda: fb.models.from_flax(FlaxNet),
        FLAT,
        ["a_last/bias", "a_last/kernel"],
        ["middle/bias", "middle/scale"],
    ),
    "equinox": (
        lambda: fb.models.from_equinox(EquinoxNet),
        FLAT,
        ["layers/2/bias", "layers/2/weight"],
        ["layers/1/bias", "layers/1/weight"],
    ),
    "torch": (
        lambda: torch_net(torch.nn.GroupNorm(2, 4)),
        IMAGE,
        ["11.bias", "11.weight"],
        ["1.bias", "1.weight"],
    ),
    "torch, frozen statistics": (
        lambda: torch_net(torch.nn.BatchNorm2d(4), freeze_batch_norm=True),
        IMAGE,
        ["11.bias", "11.weight"],
        ["1.bias", "1.weight"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_found_by_what_they_do(name):
    build, rows, head, normalization = MODELS[name]
    model = build()
    params = jax.eval_shape(model.init, jax.random.key(0))
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    assert find_part(model, rows, "head") == head
    assert find_part(model, rows, "body") == sorted(paths - set(head))
    assert find_part(model, rows, "normalization") == normalization
    biases = {path for path in paths if path.endswith(("bias", "offset"))}
    assert find_part(model, rows, "biases") == sorted(biases)


def test_a_recurrent_network():
    """Its states begin at zero, and depend on the rows from the first step on."""
    model, rows = fb.models.char_rnn(20, hidden=4), jnp.ones((2, 5), int)
    assert find_part(model, rows, "head") == ["last/bias", "last/weight"]
    inputs = [f"layers/{place}/inputs/bias" for place in range(2)]
    assert find_part(model, rows, "biases") == ["last/bias", *inputs]


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("head", "the model is nothing but its head; its parameters are weight, bias"),
        ("body", "the model has no body; its parameters are weight, bias"),
        ("normalization", "the model has no normalization; its parameters are "),
        ("tail", "'tail' is not 'head', 'body', 'biases' or 'normalization'"),
    ],
)
def test_a_part_that_is_not_there(part, line):
    with pytest.raises(SettingError, match=f"^find_part: part: {line}"):
        find_part(fb.models.softmax(4, 3), FLAT, part)
