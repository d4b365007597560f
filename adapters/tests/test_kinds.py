# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The other kinds of change, the precision of the base, and two adapters at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend import mixing, trees
from fedblend.models import Prefixed, mlp, text_classifier, transformer
from fedblend_adapters.adapt import quantize

KEY = jax.random.key(0)
ROWS = jax.random.normal(KEY, (4, 6))
TOKENS = jax.random.randint(KEY, (3, 5), 0, 9)
MLP = mlp(6, 3, hidden=(5, 5))
TEXT = transformer(9, width=8, layers=2, heads=2, kind="gpt2")
MODELS = {"mlp": (MLP, ROWS), "transformer": (TEXT, TOKENS)}


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def random_like(tree, seed=5):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        0.3 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


def merged(base, adapter, change):
    """The base with ``change(weight, parameters)`` where there are parameters."""
    return trees.map_with_path(
        lambda path, leaf: change(leaf, adapter[path]) if path in adapter else leaf,
        base,
    )


def scaled(weight, own):
    """(IA)^3 of weights [..., out, in]."""
    return weight * (1 + own["scale"])[..., None]


def with_product(weight, own):
    """LoRA of weights [..., out, in]."""
    a = own["a"] if weight.ndim == 2 else jnp.swapaxes(own["a"], 0, 1)
    return weight + own["b"] @ a


def added(weight, own):
    return weight + own["change"]


KINDS = {
    "lora": (fb.adapt.lora(2), with_product),
    "ia3": (fb.adapt.ia3(), scaled),
    "bias": (fb.adapt.bias(), added),
    "full": (fb.adapt.full(), added),
}


CASES = [
    slow(kind, name) if name == "transformer" and kind != "lora" else (kind, name)
    for kind in KINDS
    for name in MODELS
]


def close(found, expected):
    # float32, sums of at most 30 terms in another order
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_change_is_that_of_the_merged_weights(kind, name):
    (how, change), (model, rows) = KINDS[kind], MODELS[name]
    base = model.init(KEY)
    adapted = fb.adapt.adapt(model, base, how=how, inputs=rows)
    start = adapted.init(jax.random.key(1))
    apply = jax.jit(adapted.apply)
    np.testing.assert_array_equal(apply(start, rows), jax.jit(model.apply)(base, rows))
    params = random_like(start)
    both = [
        jax.jit(jax.value_and_grad(lambda own, of=of: jnp.square(of(own)).sum()))(
            params
        )
        for of in (
            lambda own: adapted.apply(own, rows),
            lambda own: model.apply(merged(base, own, change), rows),
        )
    ]
    jax.tree.map(close, *both)


def test_the_usual_biases_are_all_biases_and_those_of_full_everything():
    base = MLP.init(KEY)
    biases = fb.adapt.adapt(MLP, base, how=fb.adapt.bias(), inputs=ROWS).init(KEY)
    assert sorted(biases) == ["hidden/0/bias", "hidden/1/bias", "last/bias"]
    everything = fb.adapt.adapt(MLP, base, how=fb.adapt.full(), inputs=ROWS).init(KEY)
    assert trees.size(everything) == trees.size(base)
    layer = fb.adapt.adapt(
        MLP, base, how=fb.adapt.full(), inputs=ROWS, where="last"
    ).init(KEY)
    assert sorted(layer) == ["last/bias", "last/weight"]


@pytest.mark.parametrize("dtype", [None, slow("bfloat16")])
def test_a_prefix_is_that_of_the_model(dtype):
    base = TEXT.init(KEY)
    adapted = fb.adapt.adapt(
        TEXT, base, how=fb.adapt.prefix(3), inputs=TOKENS, dtype=dtype
    )
    params = adapted.init(jax.random.key(1))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    kept = base if dtype is None else jax.tree.map(lambda x: x.astype(dtype), base)
    expected = TEXT.apply(Prefixed(kept, params), TOKENS)
    np.testing.assert_array_equal(adapted.apply(params, TOKENS), expected)
    assert np.abs(expected - TEXT.apply(kept, TOKENS)).max() > 1e-4
    with pytest.raises(ValueError, match="adapt: where: is not for prefix"):
        fb.adapt.adapt(
            TEXT, base, how=fb.adapt.prefix(3), inputs=TOKENS, where="layers"
        )


def test_a_model_without_a_prefix_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"=3\) is not for a model with attention"):
        fb.adapt.adapt(MLP, how=fb.adapt.prefix(3), inputs=ROWS)


@pytest.mark.parametrize("kind", ["lora", *map(slow, ("ia3", "bias", "full"))])
def test_a_base_in_bfloat16_has_adapters_in_float32(kind):
    base, how = TEXT.init(KEY), KINDS[kind][0]
    wide = fb.adapt.adapt(TEXT, base, how=how, inputs=TOKENS)
    adapted = fb.adapt.adapt(TEXT, base, how=how, inputs=TOKENS, dtype="bfloat16")
    params = random_like(adapted.init(KEY))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    found = jax.jit(adapted.apply)(params, TOKENS)
    assert found.dtype == jnp.float32
    # 8 bits of mantissa: 0.4 % of each activation, over two layers
    expected = jax.jit(wide.apply)(params, TOKENS)
    np.testing.assert_allclose(found, expected, atol=0.1 * float(expected.std()))
    slope = jax.jit(jax.grad(lambda own: jnp.square(adapted.apply(own, TOKENS)).sum()))(
        params
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(slope)} == {jnp.dtype("float32")}
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slope))
    program = jax.make_jaxpr(adapted.apply)(params, TOKENS)
    assert "bf16[3,5,8]" in str(program)


@pytest.mark.parametrize("kind", ["lora", *map(slow, ("ia3", "bias", "full"))])
def test_a_base_of_8_bits_is_the_one_with_rounded_weights(kind):
    base, how = TEXT.init(KEY), KINDS[kind][0]

    def rounded(leaf):
        if leaf.ndim < 2:
            return leaf
        step = np.abs(leaf).max(axis=-1, keepdims=True) / 127
        step = np.where(step > 0, step, 1)
        return jnp.asarray(np.rint(leaf / step) * step)

    adapted = fb.adapt.adapt(TEXT, base, how=how, inputs=TOKENS, dtype="int8")
    expected = fb.adapt.adapt(TEXT, jax.tree.map(rounded, base), how=how, inputs=TOKENS)
    params = random_like(adapted.init(KEY))
    both = (jax.jit(one.apply)(params, TOKENS) for one in (adapted, expected))
    close(*both)
    program = jax.make_jaxpr(adapted.apply)(params, TOKENS)
    assert "i8[2,8,8]" in str(program)


def test_rounding_to_8_bits_is_off_by_half_a_step_at_most():
    weight = jax.random.normal(KEY, (7, 50))
    found = quantize(weight)
    assert found.entries.dtype == jnp.int8
    off = found.entries * found.steps[:, None] - weight
    # and what float32 rounds of 127 steps
    assert (jnp.abs(off) <= (0.5 + 1e-4) * found.steps[:, None]).all()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("lora", "mlp"),
        slow("lora", "transformer"),
        slow("ia3", "mlp"),
        slow("full", "mlp"),
    ],
)
def test_products_mix_the_merged_weights(kind, name):
    (how, change), (model, rows) = KINDS[kind], MODELS[name]
    base = model.init(KEY)
    adapted = fb.adapt.adapt(model, base, how=how, inputs=rows)
    shared, own = (random_like(adapted.init(KEY), seed) for seed in (1, 2))
    whole = [merged(base, one, change) for one in (shared, own)]
    apply, merge = jax.jit(adapted.apply), jax.jit(model.apply)
    for alpha in (0.0, 0.3, 1.0):
        found = apply(mixing.products(alpha, shared, own), rows)
        close(found, merge(mixing.parameters(alpha, *whole), rows))
    for alpha, alone in ((1, shared), (0, own)):
        found = apply(mixing.products(alpha, shared, own), rows)
        close(found, apply(alone, rows))
    by_factor = apply(mixing.parameters(0.3, shared, own), rows)
    by_product = apply(mixing.products(0.3, shared, own), rows)
    apart = np.abs(by_factor - by_product).max() > 1e-3
    assert apart == (kind == "lora")


def test_with_a_common_a_factors_and_products_mix_alike():
    adapted = fb.adapt.adapt(MLP, how=fb.adapt.lora(2, train="b"), inputs=ROWS)
    shared, own = (random_like(adapted.init(KEY), seed) for seed in (1, 2))
    products, factors = (
        adapted.apply(mix(0.3, shared, own), ROWS)
        for mix in (mixing.products, mixing.parameters)
    )
    np.testing.assert_array_equal(products, factors)


@pytest.mark.parametrize("kind", ["lora", *map(slow, ("ia3", "bias", "full"))])
def test_two_adapters_add_their_changes(kind):
    how, change = KINDS[kind]
    base = MLP.init(KEY)
    both = fb.adapt.two_adapters(fb.adapt.adapt(MLP, base, how=how, inputs=ROWS))
    start = both.init(KEY)
    np.testing.assert_array_equal(both.apply(start, ROWS), MLP.apply(base, ROWS))
    params = random_like(start)
    ours, own = (merged(base, one, change) for one in params.values())
    whole = trees.subtract(trees.add(ours, own), base)
    close(both.apply(params, ROWS), MLP.apply(whole, ROWS))
    assert both.features is not None and both.head is not None
    features = both.features(params, ROWS)
    close(both.head(params, features), both.apply(params, ROWS))


@pytest.mark.parametrize("name", ["mlp", slow("transformer")])
def test_gated_adapters_of_equal_weights_are_the_mixture_of_both(name):
    """A gate of zeros weighs both alike; changes are scaled, and layers stacked."""
    model, rows = MODELS[name]
    gated = fb.adapt.adapt(model, how=fb.adapt.gated_lora(2, alpha=6), inputs=rows)
    plain = fb.adapt.adapt(model, how=fb.adapt.lora(2, alpha=6), inputs=rows)
    params = random_like(gated.init(KEY))
    open_gate = jax.jit(gated.apply)(params, rows)
    for pair in params.values():
        pair["gate"] = jnp.zeros_like(pair["gate"])
    shared, own = (
        {path: pair[which] for path, pair in params.items()}
        for which in ("shared", "personal")
    )
    found = jax.jit(gated.apply)(params, rows)
    close(found, jax.jit(plain.apply)(mixing.products(0.5, shared, own), rows))
    assert np.abs(found - open_gate).max() > 1e-3


def test_what_stays_at_the_client_is_the_personal_adapter():
    rows = (np.asarray(jax.random.normal(KEY, (24, 6))), np.arange(24) % 3)
    data = fb.federate(rows, np.arange(24).reshape(4, 6))
    both = fb.adapt.two_adapters(fb.adapt.adapt(MLP, how=fb.adapt.lora(2), inputs=ROWS))
    loss = fb.losses.cross_entropy(both.apply)
    work = fb.Work(0.1, steps=1, batch_size=None)
    algorithm = fb.algorithms.fedalt(
        loss, work, personal=["personal"], personal_steps=1
    )
    start = both.init(KEY)
    run = fb.simulate(algorithm, start, data, KEY, rounds=2).complete()
    jax.tree.map(
        np.testing.assert_array_equal, run.down.shared["personal"], start["personal"]
    )
    assert run.records[-1].bits_up == 2 * 4 * 32 * trees.size(start["shared"])


@pytest.mark.slow
def test_a_classifier_has_its_halves():
    model = text_classifier(3, vocabulary=9, width=8, layers=1, heads=2)
    adapted = fb.adapt.adapt(model, how=fb.adapt.lora(2), inputs=TOKENS)
    params = random_like(adapted.init(KEY))
    assert adapted.features is not None and adapted.head is not None
    features = jax.jit(adapted.features)(params, TOKENS)
    found = jax.jit(adapted.head)(params, features)
    close(found, jax.jit(adapted.apply)(params, TOKENS))
