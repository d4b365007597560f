# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA against the model with the merged weights W + BA, written out by hand."""

from functools import partial

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import fedblend as fb
from fedblend import trees
from fedblend.models import (
    char_rnn,
    cnn,
    from_equinox,
    from_flax,
    mlp,
    transformer,
)
from fedblend.models.convolution import convolution
from fedblend_interop.torch_module import from_torch

RNG = np.random.default_rng(0)
ROWS = 3


def normal(*shape):
    return RNG.normal(size=shape)


class FlaxNet(nnx.Module):
    def __init__(self, rngs):
        own = {"rngs": rngs, "param_dtype": jnp.float64}
        self.first = nnx.Linear(8, 8, **own)
        self.attention = nnx.MultiHeadAttention(
            2, 8, decode=False, deterministic=True, **own
        )
        self.last = nnx.Linear(8, 2, **own)

    def __call__(self, inputs):
        here = nnx.relu(self.first(inputs))
        return self.last(self.attention(here)).mean(axis=1)


def equinox_net(key):
    return equinox.nn.MLP(5, 2, 5, 2, key=key, dtype=jnp.float64)


def torch_net():
    layers = (
        torch.nn.Conv2d(1, 3, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 6),
        torch.nn.GELU(),
        torch.nn.Linear(6, 2),
    )
    return torch.nn.Sequential(*layers).double()


def stacked_init(key):
    return {
        "embedding": jax.random.normal(key, (7, 4)),
        "layers": {
            "weight": jax.random.normal(key, (3, 4, 4)),
            "heads": jax.random.normal(key, (3, 4, 2, 2)),
        },
        "experts": jax.random.normal(key, (2, 4, 4)),
        "head": jax.random.normal(key, (4, 2)),
    }


def stacked_apply(params, tokens, *, remat, split=False):
    """A scan over stacked layers, with a weight reshaped, split and transposed."""

    def layer(here, own):
        if split:
            left, right = jnp.split(own["weight"], 2, axis=1)
            here = here + jnp.concatenate([here @ left, here @ right], axis=-1)
        else:
            here = here + jnp.tanh(own["weight"].T @ here.T).T
        heads = jnp.einsum("bi,ihk->bhk", here, own["heads"])
        return heads.reshape(-1, 4) @ own["heads"].reshape(4, 4).T, None

    layer = jax.checkpoint(layer) if remat else layer
    here = params["embedding"][tokens]
    here, _ = jax.lax.scan(layer, here, params["layers"])
    mixed = jnp.einsum("bi,eij->bej", here, params["experts"])
    apart = jnp.einsum("bei,eij->bej", mixed, params["experts"])
    return jnp.tanh(apart.sum(axis=1)) @ params["head"]


def kernel_init(key):
    return {"kernel": jax.random.normal(key, (3, 3, 2, 4)), "head": jnp.ones((4, 2))}


def kernel_apply(params, images):
    here = convolution(images, params["kernel"])
    return here.mean(axis=(1, 2)) @ params["head"]


# For each model: the model, inputs, where, and for every weight that is changed what
# W + BA is: the axes of A, of B and of W.
LINEAR = "ri,or->oi"
CASES = {
    "mlp": lambda: (
        mlp(5, 2, hidden=(5, 5), dtype=jnp.float64),
        normal(ROWS, 5),
        None,
        {"hidden/0/weight": LINEAR, "hidden/1/weight": LINEAR},
    ),
    "cnn": lambda: (
        cnn((16, 16, 1), 2, dtype=jnp.float64),
        normal(ROWS, 16, 16, 1),
        None,
        {
            "first/weight": "rhwi,or->hwio",
            "second/weight": "rhwi,or->hwio",
            "hidden/weight": LINEAR,
        },
    ),
    "char_rnn": lambda: (
        char_rnn(7, embedding=3, hidden=4, dtype=jnp.float64),
        RNG.integers(0, 7, (ROWS, 5)),
        lambda path: True,
        {
            "embedding": "ri,or->io",
            "layers/0/inputs/weight": LINEAR,
            "layers/0/state": LINEAR,
            "layers/1/inputs/weight": LINEAR,
            "layers/1/state": LINEAR,
            "last/weight": LINEAR,
        },
    ),
    "transformer": lambda: (
        transformer(9, width=8, layers=2, heads=4, kv_heads=2, dtype=jnp.float64),
        RNG.integers(0, 9, (ROWS, 5)),
        None,
        {
            f"layers/{part}/weight": "rli,lor->loi"
            for part in ("query", "key", "value", "out", "gate", "up", "down")
        },
    ),
    "flax": lambda: (
        from_flax(FlaxNet),
        normal(ROWS, 4, 8),
        None,
        {
            "first/kernel": "ri,or->io",
            "attention/query/kernel": "ri,hkr->ihk",
            "attention/key/kernel": "ri,hkr->ihk",
            "attention/value/kernel": "ri,hkr->ihk",
            "attention/out/kernel": "rhk,or->hko",
        },
    ),
    "equinox": lambda: (
        from_equinox(equinox_net),
        normal(ROWS, 5),
        None,
        {"layers/0/weight": LINEAR, "layers/1/weight": LINEAR},
    ),
    "torch": lambda: (
        from_torch(torch_net, np.zeros((2, 1, 6, 6))),
        normal(ROWS, 1, 6, 6),
        None,
        {"0.weight": "rihw,or->oihw", "3.weight": LINEAR},
    ),
    **{
        f"scan, {name}": lambda options=options: (
            fb.Model(stacked_init, partial(stacked_apply, **options)),
            RNG.integers(0, 7, ROWS),
            lambda path: True,
            {
                "embedding": "ri,or->io",
                "layers/weight": "rli,lor->lio",
                "layers/heads": "rli,lhkr->lihk",
                "experts": "ri,eor->eio",
                "head": "ri,or->io",
            },
        )
        for name, options in {
            "plain": {"remat": False},
            "remat": {"remat": True},
            "split": {"remat": False, "split": True},
        }.items()
    },
    "convolution": lambda: (
        fb.Model(kernel_init, kernel_apply),
        normal(ROWS, 5, 5, 2),
        None,
        {"kernel": "rhwi,or->hwio"},
    ),
}
QUICK = ("mlp", "scan, remat")


def cases():
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in CASES
    ]


def merged(base, adapter, axes, scale):
    """The weights W + scale BA."""

    def one(path, weight):
        if path not in axes:
            return weight
        own = adapter[path]
        return weight + scale * jnp.einsum(axes[path], own["a"], own["b"])

    return trees.map_with_path(one, base)


def random_like(tree, key):
    return jax.tree.map(
        lambda leaf: jax.random.normal(
            jax.random.fold_in(key, leaf.size), leaf.shape, leaf.dtype
        ),
        tree,
    )


@pytest.mark.parametrize("name", cases())
def test_a_model_with_lora_is_the_model_with_merged_weights(name):
    with jax.enable_x64(True):
        model, inputs, where, axes = CASES[name]()
        inputs = jnp.asarray(inputs)
        base = model.init(jax.random.key(3))
        how = fb.adapt.lora(2, alpha=3)
        adapted = fb.adapt.adapt(model, base, how=how, inputs=inputs, where=where)
        start = adapted.init(jax.random.key(4))
        assert set(start) == set(axes)
        outputs = jax.jit(model.apply)(base, inputs)
        found = jax.jit(adapted.apply)(start, inputs)
        np.testing.assert_allclose(found, outputs, rtol=1e-12, atol=1e-14)
        params = random_like(start, jax.random.key(5))

        def of(apply):
            slope = jax.value_and_grad(lambda own: jnp.square(apply(own)).sum())
            return jax.jit(slope)(params)

        expected, slopes = of(
            lambda own: model.apply(merged(base, own, axes, 1.5), inputs)
        )
        found, own_slopes = of(lambda own: adapted.apply(own, inputs))
        assert abs(expected / jnp.square(outputs).sum() - 1) > 1e-3
        # float64 sums in another order: a few hundred roundings of 1e-16
        np.testing.assert_allclose(found, expected, rtol=1e-11)
        for leaf, other in zip(
            *map(jax.tree.leaves, (own_slopes, slopes)), strict=True
        ):
            scale = np.abs(other).max()
            np.testing.assert_allclose(leaf / scale, other / scale, atol=1e-11)


def products(program):
    """All matrix products of a program, with the shapes of their factors."""
    for step in program.eqns:
        if step.primitive.name == "dot_general":
            _, batched = step.params["dimension_numbers"]
            yield tuple(one.aval.shape for one in step.invars), bool(batched[0])
        for inner in jax.tree.leaves(
            list(step.params.values()), is_leaf=lambda one: hasattr(one, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


WIDTH = 11


def deep_init(key):
    weights = jax.random.normal(key, (3, WIDTH, WIDTH))
    return {"layers": weights, "head": jax.random.normal(key, (WIDTH, 2))}


def deep_apply(params, here):
    @jax.checkpoint
    def layer(here, weight):
        return jnp.tanh(here @ weight), None

    return jax.lax.scan(layer, here, params["layers"])[0] @ params["head"]


@pytest.mark.parametrize(
    "model",
    [
        mlp(WIDTH, 2, hidden=(WIDTH, WIDTH)),
        fb.Model(deep_init, deep_apply),
        from_equinox(lambda key: equinox.nn.MLP(WIDTH, 2, WIDTH, 2, key=key)),
    ],
    ids=["mlp", "scan, remat", "equinox"],
)
def test_clients_share_the_products_with_the_base(model):
    clients = 6
    inputs = jnp.ones((clients, ROWS, WIDTH))
    adapted = fb.adapt.adapt(model, how=fb.adapt.lora(2), inputs=inputs[0])
    params = jax.vmap(adapted.init)(jax.random.split(jax.random.key(1), clients))

    def loss(params, inputs):
        return jnp.square(adapted.apply(params, inputs)).sum()

    program = jax.make_jaxpr(jax.vmap(jax.grad(loss)))(params, inputs)
    square = (WIDTH, WIDTH)
    with_base = [
        (shapes, batched)
        for shapes, batched in products(program.jaxpr)
        if any(shape[-2:] == square for shape in shapes)
    ]
    # In a scan both layers are one product, forward and backward.
    assert len(with_base) >= 2
    assert all(square in shapes and not batched for shapes, batched in with_base)


def test_the_factor_a_starts_as_in_the_authors_code_and_b_at_zero():
    rows = jnp.ones((2, 100))
    adapted = fb.adapt.adapt(
        mlp(100, 3, hidden=(50,)), how=fb.adapt.lora(40), inputs=rows
    )
    start = adapted.init(jax.random.key(0))["hidden/0/weight"]
    # 4000 uniform draws: the largest is within 1 % of the bound almost surely, and the
    # standard deviation bound / sqrt(3) within 3 %, which is over 4 standard errors.
    assert 0.099 < np.abs(start["a"]).max() <= 0.1
    np.testing.assert_allclose(start["a"].std(), 0.1 / np.sqrt(3), rtol=0.03)
    assert not start["b"].any()


def test_b_alone_is_trained_with_an_a_that_all_have():
    rows = normal(ROWS, 5)
    model = mlp(5, 2, hidden=(5,))
    base = model.init(jax.random.key(0))
    make = partial(fb.adapt.adapt, model, base, inputs=rows)
    ffa = make(how=fb.adapt.lora(2, train="b"))
    params = random_like(ffa.init(jax.random.key(1)), jax.random.key(2))
    assert [*params["hidden/0/weight"]] == ["b"]
    again = make(how=fb.adapt.lora(2, train="b"))
    np.testing.assert_array_equal(ffa.apply(params, rows), again.apply(params, rows))
    other = make(how=fb.adapt.lora(2, train="b", seed=1))
    assert np.abs(ffa.apply(params, rows) - other.apply(params, rows)).max() > 1e-3


def test_a_function_with_a_derivative_of_its_own_keeps_it():
    @jax.custom_vjp
    def double(weight):
        return 2 * weight

    double.defvjp(lambda weight: (double(weight), None), lambda _, up: (-7 * up,))
    model = fb.Model(
        lambda key: {"weight": jnp.ones((3, 3)), "head": jnp.ones((3, 1))},
        lambda params, x: (
            (x @ params["weight"] + x @ double(params["weight"])) @ params["head"]
        ),
    )
    rows = jnp.ones((1, 3))
    adapted = fb.adapt.adapt(model, how=fb.adapt.lora(1), inputs=rows, where="weight")
    params = {"weight": {"a": jnp.ones((1, 3)), "b": jnp.zeros((3, 1))}}
    slope = jax.grad(lambda own: adapted.apply(own, rows).sum())(params)
    # d/dB: (1 - 7) sum x A
    np.testing.assert_allclose(slope["weight"]["b"], -18 * np.ones((3, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"where": "nothing/*"}, "adapt: where: 'nothing/*' is not some of hidden/0/"),
        ({"where": 3}, "adapt: where: 3 is not patterns of paths"),
        ({"base": {"weight": np.ones(3)}}, "adapt: base: lacks 'hidden/0/weight'"),
        ({"how": 3}, "adapt: how: 3 is not"),
        ({"dtype": "int4"}, "adapt: dtype: 'int4' is not"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(wrong, message):
    options = {"how": fb.adapt.lora(2), "inputs": normal(ROWS, 5), **wrong}
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        fb.adapt.adapt(mlp(5, 2, hidden=(5,)), **options)
    assert message in str(error.value)


def test_a_linear_model_has_no_usual_weight():
    with pytest.raises(ValueError, match="the usual weights is not some of weight"):
        fb.adapt.adapt(
            fb.models.softmax(5, 2), how=fb.adapt.lora(2), inputs=normal(ROWS, 5)
        )
