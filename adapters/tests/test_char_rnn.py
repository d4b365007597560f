# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The recurrent network against loops in NumPy, and what it must not look at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend import trees
from fedblend.losses import sequence_cross_entropy
from fedblend.models import build
from fedblend_adapters import char_rnn

KEY = jax.random.key(0)
CELL = pytest.mark.parametrize("cell", ["lstm", "gru"])
IDS = np.random.default_rng(0).integers(0, 11, (3, 7), np.int32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_step(x, h, c, w, u, b):
    """Hochreiter and Schmidhuber 1997 with forget gates, one unit at a time."""
    n = len(h)
    new_h, new_c = np.zeros(n), np.zeros(n)
    for j in range(n):
        i, f, g, o = (
            w[k * n + j] @ x + u[k * n + j] @ h + b[k * n + j] for k in range(4)
        )
        new_c[j] = sigmoid(f) * c[j] + sigmoid(i) * np.tanh(g)
        new_h[j] = sigmoid(o) * np.tanh(new_c[j])
    return new_h, new_c


def gru_step(x, h, c, w, u, b):
    """Cho et al. 2014, with the reset gate after the product."""
    n = len(h)
    new = np.zeros(n)
    for j in range(n):
        r = sigmoid(w[j] @ x + u[j] @ h + b[j])
        z = sigmoid(w[n + j] @ x + u[n + j] @ h + b[n + j])
        m = np.tanh(w[2 * n + j] @ x + r * (u[2 * n + j] @ h) + b[2 * n + j])
        new[j] = (1 - z) * m + z * h[j]
    return new, c


def by_loops(cell, params, ids):
    """Row by row, place by place, layer by layer."""
    step = {"lstm": lstm_step, "gru": gru_step}[cell]
    scores = np.zeros((*ids.shape, len(params.last.bias)))
    for row in range(len(ids)):
        states = [
            (np.zeros(u.shape[1]), np.zeros(u.shape[1])) for _, u in params.layers
        ]
        for place, token in enumerate(ids[row]):
            here = params.embedding[token]
            for number, ((w, b), u) in enumerate(params.layers):
                states[number] = step(here, *states[number], w, u, b)
                here = states[number][0]
            scores[row, place] = params.last.weight @ here + params.last.bias
    return scores


def random_like(params):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)


@CELL
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_scores_are_those_of_loops(cell, layers):
    model = char_rnn(11, embedding=4, hidden=5, layers=layers, cell=cell)
    with jax.enable_x64(True):
        params = random_like(jax.eval_shape(model.init, KEY))
        found = model.apply(jax.tree.map(jnp.asarray, params), jnp.asarray(IDS))
        assert found.dtype == jnp.float64
        wanted = by_loops(cell, params, IDS)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_gradient_is_that_of_finite_differences(cell):
    model = char_rnn(11, embedding=3, hidden=4, cell=cell)
    loss = sequence_cross_entropy(model.apply)
    with jax.enable_x64(True):
        params = random_like(jax.eval_shape(model.init, KEY))
        way = jax.tree.map(lambda leaf: np.cos(np.arange(leaf.size)), params)
        way = jax.tree.map(lambda w, leaf: w.reshape(leaf.shape), way, params)
        rows = (jnp.asarray(IDS[:, :-1]), jnp.asarray(IDS[:, 1:]))

        def along(t):
            moved = jax.tree.map(lambda leaf, w: leaf + t * w, params, way)
            return loss(moved, rows).sum()

        middle = jax.grad(along)(0.0)
        gap = (along(1e-5) - along(-1e-5)) / 2e-5
        np.testing.assert_allclose(middle, gap, rtol=1e-7)


@CELL
def test_scores_do_not_look_ahead_or_at_other_rows(cell):
    model = char_rnn(11, hidden=6, cell=cell)
    params = model.init(KEY)
    other = IDS.copy()
    other[0, 4:], other[1] = 10 - other[0, 4:], 3
    before, after = model.apply(params, IDS), model.apply(params, other)
    np.testing.assert_array_equal(before[0, :4], after[0, :4])
    np.testing.assert_array_equal(before[2], after[2])
    assert not np.allclose(before[0, 4:], after[0, 4:])


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (char_rnn(90), 820_522),
        (char_rnn(80), 817_872),
        (char_rnn(80, cell="gru"), 640 + 3 * 265 * 256 + 3 * 513 * 256 + 257 * 80),
        (char_rnn(5, embedding=2, hidden=3, layers=1), 10 + 4 * 6 * 3 + 20),
    ],
)
def test_parameter_counts(model, count):
    assert trees.size(jax.eval_shape(model.init, KEY)) == count


@CELL
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_dtypes_follow_the_parameters(cell, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        model = build("char_rnn", (7,), 11, cell=cell, dtype=dtype)
        params = jax.eval_shape(model.init, KEY)
        scores = jax.eval_shape(model.apply, params, IDS)
        assert scores.shape == (3, 7, 11)
        for leaf in (*jax.tree.leaves(params), scores):
            assert leaf.dtype == dtype and not leaf.weak_type


def test_the_start():
    params = char_rnn(11, hidden=6).init(KEY)
    for layer in params.layers:
        wanted = np.repeat([0, 1, 0, 0], 6)
        np.testing.assert_array_equal(layer.inputs.bias, wanted)
        square = layer.state.T @ layer.state
        np.testing.assert_allclose(square, np.eye(6), atol=1e-5)
    assert np.abs(params.embedding).max() <= 0.05
    again = char_rnn(11, hidden=6).init(jax.random.key(1))
    assert not np.allclose(params.layers[0].state, again.layers[0].state)
    shape = params.layers[1].state.shape
    assert not np.allclose(params.layers[0].state[: shape[0]], params.layers[1].state)


@pytest.mark.slow
def test_it_learns_a_cycle():
    """Ten characters in a ring: the next one is certain."""
    ids = (np.arange(12)[None, :] + np.arange(10)[:, None]) % 10
    rows = (jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:]))
    model = char_rnn(10, hidden=16, layers=1)
    loss = sequence_cross_entropy(model.apply)

    @jax.jit
    def step(params, _):
        push = jax.grad(lambda p: loss(p, rows).mean())(params)
        return jax.tree.map(lambda p, g: p - 2.0 * g, params, push), None

    params, _ = jax.lax.scan(step, model.init(KEY), None, 300)
    assert loss(params, rows).mean() < 0.1 * np.log(10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: char_rnn(10, cell="rnn"), "cell: 'rnn' is not 'lstm' or 'gru'"),
        (lambda: char_rnn(10, hidden=0), "char_rnn: hidden: 0 is not"),
        (lambda: char_rnn(10, layers=0), "char_rnn: layers: 0 is not"),
        (
            lambda: build("char_rnn", (28, 28), 10),
            r"shape \(28, 28\) are not sequences",
        ),
    ],
)
def test_errors_are_one_clear_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
