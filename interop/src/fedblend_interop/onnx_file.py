# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A model as an ONNX file: from the raw columns to labels and probabilities.

The inputs are the columns of the raw table, preprocessed in the file:

==========  ===================  ====================================================
column      input [rows, 1]      a missing value is
==========  ===================  ====================================================
number      double               NaN
truth       double, 0 or 1       NaN
date        double, days         NaN; days since 1970 began, in UTC, with fractions
text        string               one of the texts that mean it, such as the empty one
==========  ===================  ====================================================

Arithmetic is in double precision, as in training. What a category becomes is a row of a
table that the preprocessing itself computes, for every category, for an unknown one and
for a missing one. Texts that are numbers or dates, such as ``1,234``, are read outside.

Outputs: ``label`` and ``probabilities`` of classes, ``prediction`` of a regression, and
always ``outputs``, what the model itself computes. All are float32 but the labels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree
from fedblend.data.dataset import NUMBERS, Task
from fedblend.data.preprocess.columns import PERIODS, Column
from fedblend.data.preprocess.preprocessing import FARTHEST, Fitted, Preprocessing
from fedblend.data.preprocess.schema import Schema
from fedblend.data.preprocess.values import MISSING
from fedblend.mixing import Apply, predict
from fedblend.trees import precision
from fedblend_interop.onnx_graph import (
    IR_VERSION,
    ML_OPSET,
    OPSET,
    ExportError,
    OnnxGraph,
)
from fedblend_interop.onnx_program import convert
from fedblend_interop.onnx_shapes import ints

ML = "ai.onnx.ml"
"""The domain of the operator that looks up texts."""


def onnx_file(
    model: PyTree,
    apply: Apply,
    task: Task,
    *,
    preprocessing: Preprocessing | None = None,
    numbers: bool = False,
    probable: bool = True,
    about: Mapping[str, str] | None = None,
) -> bytes:
    """A model as the bytes of an ONNX file.

    Args:
        model: parameters, or a ``Blend``.
        apply: the forward pass.
        task: what the model is for.
        preprocessing: of a raw table; None where inputs are numbers already.
        numbers: whether inputs are class numbers.
        probable: whether outputs are scores that probabilities can be made of.
        about: words for the metadata of the file.

    Raises:
        ExportError: the model computes something that has no rule.
    """
    graph = OnnxGraph()
    dtype = np.dtype(np.int32 if numbers else np.float32)
    with precision("float32"):
        small = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), model)
        add, shape = convert(graph, _forward(apply, small), task.shape, dtype)
        if preprocessing is None:
            declared, inputs = _declare_plain(graph, task, dtype)
        else:
            declared, inputs = _declare_columns(graph, preprocessing)
        outputs = add(inputs)
    results = _results(graph, outputs, shape, task, probable)
    return _bytes(graph, declared, results, about or {})


def _forward(apply: Apply, model: PyTree) -> Callable[[Any], Any]:
    return lambda inputs: predict(apply, model, inputs)


def _results(
    graph: OnnxGraph, outputs: str, shape: Sequence[Any], task: Task, probable: bool
) -> list[Any]:
    """Name the outputs of the file, and declare them."""
    graph.add("Identity", outputs, outputs=["outputs"])
    found = [graph.value_info("outputs", np.float32, shape)]
    if task.kind in NUMBERS:
        if task.exp_shift is not None:
            outputs = graph.add("Exp", outputs)
            outputs = graph.add("Sub", outputs, np.array(task.exp_shift, np.float32))
        graph.add("Identity", outputs, outputs=["prediction"])
        return [graph.value_info("prediction", np.float32, shape), *found]
    if task.kind == "tags":
        graph.add("Sigmoid", outputs, outputs=["probabilities"])
        return [graph.value_info("probabilities", np.float32, shape), *found]
    scores = outputs
    if task.kind == "binary":
        scores, shape = _two_scores(graph, outputs), (shape[0], 2)
    labels = _labels(graph, scores, shape[:-1], task)
    if not probable:
        return [labels, *found]
    graph.add("Softmax", scores, outputs=["probabilities"], axis=-1)
    return [labels, graph.value_info("probabilities", np.float32, shape), *found]


def _two_scores(graph: OnnxGraph, outputs: str) -> str:
    """Scores [rows, 2] of a single one, of which softmax makes its sigmoid.

    Two scores for two classes, of a model with cross entropy, stay as they are.
    """
    flat = graph.add("Reshape", outputs, ints(0, -1))
    zeros = graph.add("Mul", flat, np.zeros((), np.float32))
    both = graph.add("Concat", zeros, flat, axis=1)
    return graph.add("Slice", both, *(ints(n) for n in (-2, 99, 1)))


def _labels(graph: OnnxGraph, scores: str, shape: Sequence[Any], task: Task) -> Any:
    """The class of the largest score, by its name where it has one."""
    chosen = graph.add("ArgMax", scores, axis=-1, keepdims=0)
    if not task.labels:
        graph.add("Identity", chosen, outputs=["label"])
        return graph.value_info("label", np.int64, shape)
    graph.add(
        "LabelEncoder",
        chosen,
        outputs=["label"],
        domain=ML,
        keys_int64s=list(range(len(task.labels))),
        values_strings=list(task.labels),
    )
    return graph.value_info("label", object, shape)


def _bytes(
    graph: OnnxGraph, declared: list[Any], results: list[Any], about: Mapping[str, str]
) -> bytes:
    onnx, make = graph.onnx, graph.onnx.helper
    constants = [
        onnx.numpy_helper.from_array(array, name)
        for name, array in graph.constants.items()
    ]
    made = make.make_model(
        make.make_graph(graph.nodes, "fedblend", declared, results, constants),
        producer_name="fedblend",
        opset_imports=[
            make.make_opsetid("", OPSET),
            make.make_opsetid(ML, ML_OPSET),
        ],
        ir_version=IR_VERSION,
    )
    make.set_model_props(made, dict(about))
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()


def _declare_plain(graph: OnnxGraph, task: Task, dtype: Any) -> tuple[list[Any], str]:
    """The inputs without preprocessing: a number for each column, or one tensor.

    Returns:
        The declared inputs, and the name of the tensor that the model takes.
    """
    if not task.columns or len(task.columns) != int(np.prod(task.shape)):
        graph.rows = _rows(graph, "inputs")
        shape = ["rows", *task.shape]
        return [graph.value_info("inputs", dtype, shape)], "inputs"
    graph.rows = _rows(graph, task.columns[0])
    declared = [
        graph.value_info(name, np.float32, ["rows", 1]) for name in task.columns
    ]
    joined = graph.add("Concat", *task.columns, axis=1)
    shape = ints(-1, *task.shape)
    joined = graph.add("Reshape", joined, shape)
    return declared, graph.add("Cast", joined, to=graph.element_type(dtype))


def _declare_columns(
    graph: OnnxGraph, preprocessing: Preprocessing
) -> tuple[list[Any], str]:
    """The inputs of a raw table, and the tensor that its preprocessing computes."""
    if preprocessing.schema.ranks:
        raise ExportError(
            "onnx: the ranks that preprocessing makes of numbers cannot be "
            "exported; --to "
            "safetensors exports every model"
        )
    graph.rows = _rows(graph, preprocessing.columns[0])
    declared, parts = [], []
    for column, fitted in zip(
        preprocessing.schema.kept, preprocessing.fitted, strict=True
    ):
        words = column.encoding in ("one_hot", "ordinal")
        kind = np.dtype(object) if words else np.dtype(np.float64)
        declared.append(graph.value_info(column.name, kind, ["rows", 1]))
        alone = Preprocessing(Schema((column,)), (fitted,))
        if words:
            parts.append(_words(graph, column, alone))
        elif column.encoding == "flag":
            parts.append(_flag(graph, column, alone))
        else:
            parts.append(_quantity(graph, column, fitted))
    return declared, graph.add("Concat", *parts, axis=1)


def _rows(graph: OnnxGraph, name: str) -> str:
    return graph.add("Shape", name, start=0, end=1)


def _table(alone: Preprocessing, numbers: list[float]) -> np.ndarray:
    """What each of these encoded values becomes: float32 [values, inputs]."""
    return alone.transform_encoded(np.asarray(numbers, np.float64)[:, None])


def _words(graph: OnnxGraph, column: Column, alone: Preprocessing) -> str:
    known = len(column.categories)
    unknown = float(known) if column.encoding == "one_hot" else float("nan")
    table = _table(alone, [*map(float, range(known)), unknown, float("nan")])
    places = {word: place for place, word in enumerate(column.categories)}
    places |= dict.fromkeys(sorted(MISSING), known + 1)
    code = graph.add(
        "LabelEncoder",
        column.name,
        domain=ML,
        keys_strings=list(places),
        values_int64s=list(places.values()),
        default_int64=known,
    )
    flat = graph.add("Reshape", code, ints(-1))
    return graph.add("Gather", table, flat, axis=0)


def _flag(graph: OnnxGraph, column: Column, alone: Preprocessing) -> str:
    """0, 1 or missing; what is neither 0 nor 1 is missing, as in training."""
    table = _table(alone, [0.0, 1.0, float("nan")])
    code = ints(2)
    for place in (0, 1):
        same = graph.add("Equal", column.name, np.asarray(float(place)))
        code = graph.add("Where", same, ints(place), code)
    flat = graph.add("Reshape", code, ints(-1))
    return graph.add("Gather", table, flat, axis=0)


def _quantity(graph: OnnxGraph, column: Column, fitted: Fitted) -> str:
    """A number or a date: filled, standardized, with its periods."""
    name = column.name
    unusual = graph.add("IsNaN", name), graph.add("IsInf", name)
    absent = graph.add("Or", *unusual)
    mean, zero = np.asarray(fitted.mean, np.float64), np.zeros((), np.float64)
    filled = graph.add("Where", absent, mean, name)
    parts = [filled]
    if column.encoding != "as_is":
        scale = np.asarray(fitted.scale, np.float64)
        away = graph.add("Div", graph.add("Sub", filled, mean), scale)
        parts = [graph.add("Clip", away, *np.array([-FARTHEST, FARTHEST]))]
    for part in column.parts:
        factor = np.asarray(PERIODS[part], np.float64)
        turns = graph.add(
            "Mul", np.asarray(2 * np.pi), graph.add("Where", absent, zero, name)
        )
        angle = graph.add("Div", turns, factor)
        for wave in ("Sin", "Cos"):
            parts.append(graph.add("Where", absent, zero, graph.add(wave, angle)))
    if column.missing:
        parts.append(graph.add("Cast", absent, to=graph.element_type(np.float64)))
    joined = graph.add("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    return graph.add("Cast", joined, to=graph.element_type(np.float32))
