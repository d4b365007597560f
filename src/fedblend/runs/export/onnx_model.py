# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A model as an ONNX file: from the raw columns to labels and probabilities.

Outputs: ``label`` and ``probabilities`` of classes, ``prediction`` of a regression, and
always ``outputs``, what the model itself computes. All are float32 but the labels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree
from fedblend.data.dataset import Task
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.mixing import Apply, Neighbors, predict
from fedblend.runs.export import onnx_columns
from fedblend.runs.export.onnx_graph import (
    IR_VERSION,
    ML_OPSET,
    OPSET,
    ExportError,
    Graph,
)
from fedblend.runs.export.onnx_program import convert
from fedblend.trees import precision


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
    if isinstance(model, Neighbors):
        raise ExportError(
            "onnx: there is no rule for a model beside rows of a client; --to "
            "safetensors exports every model"
        )
    graph = Graph()
    dtype = np.dtype(np.int32 if numbers else np.float32)
    with precision("float32"):
        small = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), model)
        add, shape = convert(graph, _forward(apply, small), task.shape, dtype)
        if preprocessing is None:
            declared, inputs = onnx_columns.declare_plain(graph, task, dtype)
        else:
            declared, inputs = onnx_columns.declare_columns(graph, preprocessing)
        outputs = add(inputs)
    results = _results(graph, outputs, shape, task, probable)
    return _bytes(graph, declared, results, about or {})


def _forward(apply: Apply, model: PyTree) -> Callable[[Any], Any]:
    return lambda inputs: predict(apply, model, inputs)


def _results(
    graph: Graph, outputs: str, shape: Sequence[Any], task: Task, probable: bool
) -> list[Any]:
    """Name the outputs of the file, and declare them."""
    graph.add("Identity", outputs, outputs=["outputs"])
    found = [graph.value_info("outputs", np.float32, shape)]
    if task.kind == "regression":
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


def _two_scores(graph: Graph, outputs: str) -> str:
    """Scores [rows, 2] of a single one, of which softmax makes its sigmoid.

    Two scores for two classes, of a model with cross entropy, stay as they are.
    """
    flat = graph.add("Reshape", outputs, np.asarray([0, -1], np.int64))
    zeros = graph.add("Mul", flat, np.zeros((), np.float32))
    both = graph.add("Concat", zeros, flat, axis=1)
    return graph.add("Slice", both, *(np.asarray([n], np.int64) for n in (-2, 99, 1)))


def _labels(graph: Graph, scores: str, shape: Sequence[Any], task: Task) -> Any:
    """The class of the largest score, by its name where it has one."""
    chosen = graph.add("ArgMax", scores, axis=-1, keepdims=0)
    if not task.labels:
        graph.add("Identity", chosen, outputs=["label"])
        return graph.value_info("label", np.int64, shape)
    graph.add(
        "LabelEncoder",
        chosen,
        outputs=["label"],
        domain=onnx_columns.ML,
        keys_int64s=list(range(len(task.labels))),
        values_strings=list(task.labels),
    )
    return graph.value_info("label", object, shape)


def _bytes(
    graph: Graph, declared: list[Any], results: list[Any], about: Mapping[str, str]
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
            make.make_opsetid(onnx_columns.ML, ML_OPSET),
        ],
        ir_version=IR_VERSION,
    )
    make.set_model_props(made, dict(about))
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()
