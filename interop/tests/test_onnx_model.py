# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""An ONNX file computes in onnxruntime what the model computes in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import fedblend as fb
from fedblend import models
from fedblend.data.dataset import Task
from fedblend_interop.onnx_file import onnx_file
from fedblend_interop.onnx_graph import ExportError

TOLERANCE = 1e-5
"""Relative to the largest output; float32 sums in another order differ by 1e-6."""
LABELS = tuple("abcdefghijklmnopqrst")
CASES = {
    "softmax": ("softmax", (4,), 3, "classes", {}),
    "logistic": ("logistic", (4,), 1, "binary", {"intercept": False}),
    "mlp": ("mlp", (4,), 3, "classes", {"hidden": (6, 5)}),
    "mlp, two scores": ("mlp", (4,), 2, "binary", {"hidden": (6,)}),
    "mlp, softplus": ("mlp", (2, 2), 1, "regression", {"activation": "softplus"}),
    "mlp, gelu": ("mlp", (4,), 3, "tags", {"activation": "gelu"}),
    "mlp, sigmoid": ("mlp", (4,), 3, "classes", {"activation": "sigmoid"}),
    "mlp, tanh": ("mlp", (4,), 3, "classes", {"activation": "tanh"}),
    "cnn": ("cnn", (17, 16), 10, "classes", {}),
    "large_cnn": ("large_cnn", (7, 8, 3), 10, "classes", {}),
    "lstm": ("char_rnn", (5,), 20, "sequence", {"hidden": 6}),
    "gru": ("char_rnn", (5,), 20, "sequence", {"hidden": 6, "cell": "gru"}),
}


def drawn(model: fb.Model, seed: int):
    """Parameters without zeros, so that nothing is hidden."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + 0.1 * draw.normal(size=leaf.shape).astype(np.float32),
        model.init(jax.random.key(seed)),
    )


def computed(file: bytes, inputs: dict) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(None, inputs)), strict=True))


def assert_close(found, expected):
    assert found.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(found - expected).max() <= TOLERANCE * scale


@pytest.mark.parametrize("case", CASES)
def test_every_model_with_any_number_of_rows(case):
    name, shape, outputs, kind, options = CASES[case]
    model = models.build(name, shape, outputs, **options)
    numbers = name == "char_rnn"
    labels = {"classes": LABELS[:outputs], "binary": ("no", "yes")}.get(kind, ())
    task = Task(kind, 1 if kind == "binary" else outputs, shape, labels)  # pyright: ignore
    mixture = fb.Blend(jnp.float32(0.3), drawn(model, 0), drawn(model, 1))
    draw = np.random.default_rng(2)
    for params in (mixture.shared, mixture) if name == "mlp" else (mixture,):
        file = onnx_file(params, model.apply, task, numbers=numbers)
        inputs = draw.normal(size=(3, *shape)).astype(np.float32)
        if numbers:
            inputs = draw.integers(0, outputs, (3, *shape)).astype(np.int32)
        scores = np.asarray(
            jax.jit(fb.predict, static_argnums=0)(model.apply, params, inputs)
        )
        for rows in (1, 3):
            found = computed(file, {"inputs": inputs[:rows]})
            assert_close(found["outputs"], scores[:rows])
            check_results(found, scores[:rows], kind, labels)


def check_results(found, scores, kind, labels):
    if kind == "regression":
        assert_close(found["prediction"], scores)
    elif kind == "tags":
        assert_close(found["probabilities"], np.asarray(jax.nn.sigmoid(scores)))
    else:
        if kind == "binary" and scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        if "probabilities" in found:
            assert_close(found["probabilities"], np.asarray(jax.nn.softmax(scores)))
        best = scores.argmax(axis=-1)
        expected = np.array(labels)[best] if labels else best
        assert (found["label"] == expected).all()


def test_columns_of_numbers_are_inputs_of_their_own():
    model = models.build("softmax", (2,), 3)
    params = drawn(model, 0)
    task = Task("classes", 3, (2,), ("a", "b", "c"), ("age", "blood pressure"))
    inputs = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    file = onnx_file(params, model.apply, task, about={"round": "7"})
    columns = {name: inputs[:, [at]] for at, name in enumerate(task.columns)}
    assert_close(
        computed(file, columns)["outputs"], np.asarray(model.apply(params, inputs))
    )
    (entry,) = onnx.load_from_string(file).metadata_props
    assert (entry.key, entry.value) == ("round", "7")


def applied(function):
    """The operators of a function of rows of two numbers, run by onnxruntime."""
    task = Task("regression", 1, (4, 6))
    inputs = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
    file = onnx_file((), lambda _, rows: function(rows), task)
    assert_close(
        computed(file, {"inputs": inputs})["outputs"],
        np.asarray(jax.jit(function)(inputs)),
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.einsum("rij,rkj->rik", x, x),
        lambda x: jnp.concatenate([x, jnp.zeros((x.shape[0], 4, 1))], axis=2),
        lambda x: jax.lax.conv_general_dilated(
            x[:, None], jnp.ones((2, 1, 2, 3)), (1, 2), [(1, 0), (1, 1)]
        ),
        lambda x: jax.lax.conv_general_dilated(
            x[..., None],
            jnp.arange(12.0).reshape(2, 3, 1, 2),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ),
        lambda x: jax.lax.conv_transpose(
            x[:, None],
            jnp.arange(4.0).reshape(1, 1, 2, 2),
            (2, 3),
            "VALID",
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        ),
        lambda x: jax.lax.reduce_window(
            x[:, None], -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
        ),
        lambda x: jax.lax.reduce_window(
            x, 0.0, jax.lax.add, (1, 1, 3), (1, 1, 1), [(0, 0), (0, 0), (1, 1)]
        ),
        lambda x: x[:, jnp.array([2, 0, 2])],
        lambda x: x[:, :, jnp.array([5, 1])],
        lambda x: x[:, 1:3, 4],
        lambda x: x[:, ::2, ::3],
        lambda x: jnp.stack([x, jnp.tile(jnp.flip(x), (1, 1, 1))], axis=1),
        lambda x: jnp.take_along_axis(x, x.argmax(axis=1, keepdims=True), axis=1),
        lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))),
        lambda x: jnp.cumsum(x, axis=1),
        lambda x: jax.nn.softmax(x) * jax.nn.silu(x) + jnp.expm1(x),
        lambda x: jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), x**3) / (1 + jnp.square(x)),
        lambda x: jnp.clip(jnp.round(10 * x), -5, 5) + jnp.argmax(x, axis=2)[..., None],
        lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[:, 0, 0], x[:, 0].T)[1],
        lambda x: jax.lax.scan(
            lambda c, y: (c + y, c), x[:, 0, 0], x[:, 0].T, reverse=True
        )[1],
        lambda x: (
            (x - x.mean(2, keepdims=True)) * jax.lax.rsqrt(x.var(2, keepdims=True))
        ),
        lambda x: jax.lax.erf(x) + jax.lax.erfc(x) + jnp.minimum(x, 0),
    ],
)
def test_operators(function):
    applied(function)


def test_what_has_no_rule_is_named_before_anything_is_written():
    with pytest.raises(
        ExportError, match=r"the model uses sort, which cannot be exported"
    ):
        applied(lambda x: jnp.sort(x))
    with pytest.raises(ExportError, match="needs to know the number of rows"):
        applied(lambda x: x if x.shape[0] > 3 else 2 * x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.last = nn.LSTM(6, 5, 2, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.cells(x)[0][:, -1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4)),
            *(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 3)),
        ),
        Recurrent,
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
    ],
)
def test_modules_of_pytorch(module):
    """As PyTorch itself computes them."""
    torch.manual_seed(0)
    net, rows = module().eval(), torch.randn(3, 4, 6)
    model = fb.models.from_torch(net, rows[:2])
    params = model.init(jax.random.key(0))
    file = onnx_file(params, model.apply, Task("regression", 1, (4, 6)))
    found = computed(file, {"inputs": rows.numpy()})["outputs"]
    assert_close(found, net(rows).detach().numpy())
