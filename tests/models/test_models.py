# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend import trees
from fedblend.losses import cross_entropy
from fedblend.models import MODELS, build, cnn, large_cnn, logistic, mlp, softmax

KEY = jax.random.key(0)

COUNTS = {
    "softmax": (softmax(784, 10), 7850),
    "softmax without intercept": (softmax(784, 10, intercept=False), 7840),
    "logistic": (logistic(20), 21),
    "logistic without intercept": (logistic(20, intercept=False), 20),
    "mlp": (mlp(784, 10), 785 * 200 + 201 * 200 + 201 * 10),
    "mlp without hidden layers": (mlp(5, 3, hidden=()), 18),
    "cnn on mnist": (cnn((28, 28), 10), 440_812),
    "cnn on cifar": (cnn((32, 32, 3), 10), 672_212),
    "large_cnn on cifar": (large_cnn((32, 32, 3), 10), 1_626_442),
    "large_cnn on emnist digits": (large_cnn((28, 28, 1), 10), 1_199_882),
    "large_cnn on emnist": (large_cnn((28, 28, 1), 62), 1_206_590),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    model, count = COUNTS[name]
    assert trees.size(jax.eval_shape(model.init, KEY)) == count


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MODELS
        if name not in ("char_rnn", "text_classifier", "transformer")
    ],
)
def test_shapes_and_dtypes_follow_the_parameters(name):
    classes = 2 if name == "logistic" else 3
    shape = (16, 16, 2)
    images = np.random.default_rng(0).integers(0, 255, (4, *shape), np.uint8)
    for dtype in (jnp.float32, jnp.float64):
        with jax.enable_x64(dtype == jnp.float64):
            model = build(name, shape, classes, dtype=dtype)
            params = jax.eval_shape(model.init, KEY)
            outputs = jax.eval_shape(model.apply, params, images)
            assert outputs.shape == ((4,) if name == "logistic" else (4, classes))
            for leaf in (*jax.tree.leaves(params), outputs):
                assert leaf.dtype == dtype and not leaf.weak_type


@pytest.mark.parametrize("name", ["softmax", "cnn"])
def test_rows_may_come_flattened(name):
    model = build(name, (16, 16, 2), 3)
    images = jax.random.normal(KEY, (4, 16, 16, 2))

    @jax.jit
    def gap(params):
        outputs = model.apply(params, images)
        return jnp.abs(outputs - model.apply(params, images.reshape(4, -1))).max()

    assert gap(jax.jit(model.init)(KEY)) == 0


@pytest.mark.parametrize("name", ["mlp", "cnn", "large_cnn"])
def test_initialization_keeps_the_scale_and_depends_on_the_key(name):
    model = build(name, (20, 20), 10)
    init = jax.jit(model.init)
    one, other = init(KEY), init(jax.random.key(1))
    assert not np.allclose(one.last.weight, other.last.weight)
    inputs = jax.random.normal(KEY, (64, 20, 20))
    # He's weights keep second moments under ReLU; the maximum of four raises them.
    assert 0.2 < float(jnp.std(jax.jit(model.apply)(one, inputs))) < 6


def test_linear_models_start_at_zero_and_are_linear():
    params = softmax(3, 2).init(KEY)
    assert all(not leaf.any() for leaf in jax.tree.leaves(params))
    params = params._replace(weight=jnp.arange(6.0).reshape(2, 3), bias=jnp.ones(2))
    inputs = np.array([[1.0, 2.0, 3.0]], np.float32)
    expected = inputs @ np.arange(6.0).reshape(2, 3).T + 1
    np.testing.assert_allclose(softmax(3, 2).apply(params, inputs), expected)


def test_mlp_is_what_it_says():
    model = mlp(3, 2, hidden=(4,), activation="tanh")
    (hidden,), _, last = params = model.init(KEY)
    inputs = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    expected = np.tanh(inputs @ hidden.weight.T) @ last.weight.T
    np.testing.assert_allclose(model.apply(params, inputs), expected, rtol=1e-5)


def test_models_learn():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 20)
    images = rng.normal(size=(20, 16, 16)) + labels[:, None, None]
    model = cnn((16, 16), 2)
    loss = cross_entropy(model.apply)

    @jax.jit
    def mean(params):
        return loss(params, (jnp.asarray(images, jnp.float32), labels)).mean()

    step = jax.jit(lambda p: trees.subtract(p, trees.scale(0.01, jax.grad(mean)(p))))
    params = jax.jit(model.init)(KEY)
    before = mean(params)
    for _ in range(10):
        params = step(params)
    assert mean(params) < 0.5 * before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("mpl", (4,), 2), "model: 'mpl' is unknown; did you mean 'mlp'?"),
        (
            lambda: build("mlp", (4,), 2, hiden=(3,)),
            "mlp: no option 'hiden'; did you mean 'hidden'?",
        ),
        (lambda: build("logistic", (4,), 3), "logistic: 3 outputs"),
        (
            lambda: mlp(4, 2, activation="rely"),
            "mlp: activation: 'rely' is not",
        ),
        (lambda: mlp(4, 2, hidden=(3, 0)), r"mlp: hidden\[1\]: 0 is not"),
        (lambda: softmax(0, 2), "softmax: inputs: 0 is not"),
        (lambda: cnn((15, 20), 2), "cnn: an image of 15x20 is too small"),
        (lambda: cnn((784,), 10), r"cnn: rows of shape \(784,\) are not images"),
    ],
)
def test_errors_are_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_registry_says_options_with_their_defaults():
    assert MODELS["mlp"].options["hidden"] == (200, 200)
    assert MODELS["softmax"].options["intercept"] is True
    assert all(info.summary for info in MODELS.values())
