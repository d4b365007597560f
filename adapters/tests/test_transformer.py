# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The transformer against loops in NumPy, and what its scores must not look at."""

import dataclasses
from functools import partial
from typing import Any

import by_loops
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend import trees
from fedblend.losses import sequence_cross_entropy
from fedblend.models import (
    Prefixed,
    build,
    set_products,
    text_classifier,
    transformer,
)
from fedblend_adapters.transformer import build_transformer
from fedblend_adapters.transformer_layers import Architecture

KEY = jax.random.key(0)
IDS = np.random.default_rng(0).integers(0, 11, (3, 6), np.int32)
PADDED = IDS.copy()
PADDED[1, 4:] = -1
SMALL = Architecture(11, 8, width=8, layers=2, heads=2, hidden=6)
GPT2 = dataclasses.replace(SMALL, kind="gpt2")
KINDS = {
    "decoder": SMALL,
    "grouped": dataclasses.replace(SMALL, heads=4, kv_heads=2),
    "gpt2": GPT2,
    "encoder": dataclasses.replace(SMALL, classes=3),
    "gpt2 encoder": dataclasses.replace(GPT2, classes=3),
}


def drawn(model, seed=0):
    """The parameters at the start, by one program."""
    return jax.jit(model.init)(jax.random.key(seed))


def scores_of(model, params, rows):
    return jax.jit(model.apply)(params, rows)


def random_like(shapes):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)


CASES = [
    pytest.param(
        kind,
        prefix,
        marks=pytest.mark.slow if prefix and kind not in ("grouped", "encoder") else (),
    )
    for kind in KINDS
    for prefix in (0, 2)
]
"""With a prefix, the two that differ most; slow tests have all."""


@pytest.mark.parametrize(("kind", "prefix"), CASES)
def test_the_scores_are_those_of_loops(kind, prefix):
    form = KINDS[kind]
    rows = IDS if form.causal else PADDED
    with jax.enable_x64(True):
        model = build_transformer(form, dtype=jnp.float64)
        own = random_like(jax.eval_shape(model.init, KEY))
        params = jax.tree.map(jnp.asarray, own)
        before = None
        if prefix:
            make: Any = model.prefix
            before = random_like(jax.eval_shape(lambda key: make(key, prefix), KEY))
            params = Prefixed(params, jax.tree.map(jnp.asarray, before))
        found = scores_of(model, params, jnp.asarray(rows))
    assert found.dtype == jnp.float64
    wanted = by_loops.scores(form, own, rows, before)
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "kind", ["grouped", pytest.param("gpt2", marks=pytest.mark.slow)]
)
def test_the_gradient_is_that_of_finite_differences(kind):
    form = dataclasses.replace(KINDS[kind], remat=True)
    loss = sequence_cross_entropy(build_transformer(form, dtype=jnp.float64).apply)
    with jax.enable_x64(True):
        model = build_transformer(form, dtype=jnp.float64)
        params = random_like(jax.eval_shape(model.init, KEY))
        way = jax.tree.map(
            lambda leaf: np.cos(np.arange(leaf.size)).reshape(leaf.shape), params
        )
        rows = (jnp.asarray(IDS[:, :-1]), jnp.asarray(IDS[:, 1:]))

        @jax.jit
        def along(t):
            moved = jax.tree.map(lambda leaf, w: leaf + t * w, params, way)
            return loss(moved, rows).sum()

        middle = jax.jit(jax.grad(along))(0.0)
        gap = (along(1e-6) - along(-1e-6)) / 2e-6
    # The truncation and rounding of a central difference with this step.
    np.testing.assert_allclose(middle, gap, rtol=1e-5)


@pytest.mark.parametrize(
    "otherwise", [partial(transformer, remat=True), partial(transformer, unroll=True)]
)
def test_computing_layers_otherwise_changes_nothing(otherwise):
    plain, again = (
        build(11, width=8, heads=2, layers=2) for build in (transformer, otherwise)
    )
    params = drawn(plain)

    def gradient(model):
        loss = sequence_cross_entropy(model.apply)
        rows = (IDS[:, :-1], IDS[:, 1:])
        return jax.jit(jax.grad(lambda own: loss(own, rows).sum()))(params)

    one, other = gradient(plain), gradient(again)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # float32 sums


@pytest.mark.parametrize("kind", ["gpt2", "grouped"])
def test_scores_do_not_look_ahead_or_at_other_rows(kind):
    model = build_transformer(KINDS[kind], jnp.float32)
    params = drawn(model)
    other = IDS.copy()
    other[0, 4:], other[1] = 10 - other[0, 4:], 3
    before, after = (scores_of(model, params, rows) for rows in (IDS, other))
    np.testing.assert_array_equal(before[0, :4], after[0, :4])
    np.testing.assert_array_equal(before[2], after[2])
    assert not np.allclose(before[0, 4:], after[0, 4:])


def test_padding_changes_nothing_of_a_causal_loss():
    """Inputs behind the end of a text, with negative targets, do not count."""
    model = transformer(11, width=8, heads=2, layers=2)
    params = drawn(model)
    loss = jax.jit(sequence_cross_entropy(model.apply))
    inputs, targets = IDS[:1, :-1], IDS[:1, 1:]
    for fill in (0, 7, -1):
        longer = np.pad(inputs, ((0, 0), (0, 4)), constant_values=fill)
        more = np.pad(targets, ((0, 0), (0, 4)), constant_values=-1)
        found, wanted = loss(params, (longer, more)), loss(params, (inputs, targets))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)  # float32 sums


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_changes_no_class_score(kind):
    model = text_classifier(3, vocabulary=11, width=8, heads=2, layers=2, kind=kind)
    params = drawn(model)
    longer = np.pad(IDS, ((0, 0), (0, 3)), constant_values=-1)
    found, wanted = (scores_of(model, params, rows) for rows in (longer, IDS))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)  # float32 sums


def test_bfloat16_parameters_have_float32_scores():
    options: dict[str, Any] = {"width": 32, "layers": 3, "kv_heads": 2}
    model, wide = (transformer(11, dtype=d, **options) for d in ("bfloat16", "float32"))
    params = drawn(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    found = scores_of(model, params, IDS)
    assert found.dtype == jnp.float32
    same = jax.tree.map(lambda leaf: leaf.astype("float32"), params)
    wanted = scores_of(wide, same, IDS)
    # 8 bits of mantissa, over the few roundings of three layers.
    np.testing.assert_allclose(found, wanted, atol=0.03 * np.abs(wanted).max())
    assert model.prefix is not None and model.prefix(KEY, 3).key.dtype == jnp.float32


def test_a_cohort_of_models_is_one_program():
    """Under ``vmap`` over clients, over parameters or over rows alone."""
    model = transformer(11, width=8, heads=2, layers=2)
    params = [drawn(model, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    rows = jnp.stack([IDS, 10 - IDS])
    found = jax.jit(jax.vmap(model.apply))(stacked, rows)
    for place in (0, 1):
        wanted = scores_of(model, params[place], rows[place])
        np.testing.assert_allclose(found[place], wanted, rtol=1e-5, atol=1e-6)
    one = jax.jit(jax.vmap(model.apply, (None, 0)))(params[0], rows)
    np.testing.assert_allclose(one[0], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["decoder", "gpt2 encoder"])
def test_the_halves_make_the_whole(kind):
    model = build_transformer(KINDS[kind], jnp.float32)
    features, head = model.features, model.head
    assert features is not None and head is not None

    @jax.jit
    def both(params):
        found = features(params, IDS)
        return found, head(params, found), model.apply(params, IDS)

    found, halves, whole = both(drawn(model))
    assert found.shape == ((3, 8) if KINDS[kind].classes else (3, 6, 8))
    np.testing.assert_array_equal(halves, whole)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (transformer(2048), 1_053_824),
        # GPT-2, 124 million: Radford et al. 2019, the count of its published weights.
        (
            transformer(
                50257,
                width=768,
                layers=12,
                heads=12,
                kind="gpt2",
            ),
            124_439_808,
        ),
        # Llama 2, 7 billion: Touvron et al. 2023, the count of its published weights,
        # less those of the scores, which are the embedding's here.
        (
            transformer(32000, width=4096, layers=32, heads=32, hidden=11008),
            6_738_415_616 - 32000 * 4096,
        ),
    ],
)
def test_parameter_counts(model, count):
    assert trees.size(jax.eval_shape(model.init, KEY)) == count


@pytest.mark.parametrize("name", ["transformer", "text_classifier"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_dtypes_follow_the_parameters(name, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        model = build(name, (7,), 11, dtype=dtype)
        params = jax.eval_shape(model.init, KEY)
        scores = jax.eval_shape(model.apply, params, IDS)
        assert scores.shape == ((3, 6, 11) if name == "transformer" else (3, 11))
        for leaf in (*jax.tree.leaves(params), scores):
            assert leaf.dtype == dtype and not leaf.weak_type


def test_the_start():
    params, again = (
        drawn(transformer(11, width=64, layers=2), seed) for seed in (0, 1)
    )
    assert 0.018 < np.std(params.layers.query.weight) < 0.022
    assert 0.009 < np.std(params.layers.down.weight) < 0.011  # 0.02 / sqrt(2 * 2)
    assert not np.allclose(params.layers.up.weight[0], params.layers.up.weight[1])
    assert not np.allclose(params.layers.up.weight, params.layers.gate.weight)
    assert not np.allclose(params.embedding.tokens, again.embedding.tokens)


def test_products_of_another_precision_keep_the_prefix():
    model = set_products(transformer(11, width=8, heads=2), "bfloat16")
    assert model.prefix is not None
    params = Prefixed(drawn(model), model.prefix(KEY, 2))
    assert jax.eval_shape(model.apply, params, IDS).shape == (3, 6, 11)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transformer(0), "transformer: vocabulary: 0 is not a whole number"),
        (
            lambda: transformer(9, heads=4, kv_heads=3),
            "transformer: kv_heads: 3 is not a divisor of heads = 4",
        ),
        (
            lambda: transformer(9, width=10),
            "transformer: heads: 4 is not a divisor of width = 10",
        ),
        (
            lambda: transformer(9, width=12),
            "transformer: head_width: 3 is not even, which rotary positions need",
        ),
        (
            lambda: transformer(9, kind="bert"),
            "transformer: kind: 'bert' is not 'llama' or 'gpt2'",
        ),
        (lambda: build("transformer", (4, 4), 9), "transformer: rows of shape"),
        (lambda: build("text_classifier", (4, 4), 9), "text_classifier: rows of shape"),
        (
            lambda: jax.eval_shape(
                (model := transformer(9, 4, kind="gpt2")).apply,
                jax.eval_shape(model.init, KEY),
                IDS,
            ),
            "transformer: length: 4 is not 6",
        ),
    ],
)
def test_errors_are_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
