# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The inputs of an ONNX file: one for each column of the raw table, preprocessed.

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
"""

from typing import Any

import numpy as np

from fedblend.data.dataset import Task
from fedblend.data.preprocess.columns import PERIODS, Column
from fedblend.data.preprocess.preprocessing import FARTHEST, Fitted, Preprocessing
from fedblend.data.preprocess.schema import Schema
from fedblend.data.preprocess.values import MISSING
from fedblend.runs.export.onnx_graph import Graph

ML = "ai.onnx.ml"
"""The domain of the operator that looks up texts."""


def declare_plain(graph: Graph, task: Task, dtype: Any) -> tuple[list[Any], str]:
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
    shape = np.asarray([-1, *task.shape], np.int64)
    joined = graph.add("Reshape", joined, shape)
    return declared, graph.add("Cast", joined, to=graph.element_type(dtype))


def declare_columns(
    graph: Graph, preprocessing: Preprocessing
) -> tuple[list[Any], str]:
    """The inputs of a raw table, and the tensor that its preprocessing computes."""
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


def _rows(graph: Graph, name: str) -> str:
    return graph.add("Shape", name, start=0, end=1)


def _table(alone: Preprocessing, numbers: list[float]) -> np.ndarray:
    """What each of these encoded values becomes: float32 [values, inputs]."""
    return alone.transform_encoded(np.asarray(numbers, np.float64)[:, None])


def _words(graph: Graph, column: Column, alone: Preprocessing) -> str:
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
    flat = graph.add("Reshape", code, np.asarray([-1], np.int64))
    return graph.add("Gather", table, flat, axis=0)


def _flag(graph: Graph, column: Column, alone: Preprocessing) -> str:
    """0, 1 or missing; what is neither 0 nor 1 is missing, as in training."""
    table = _table(alone, [0.0, 1.0, float("nan")])
    code = np.asarray([2], np.int64)
    for place in (0, 1):
        same = graph.add("Equal", column.name, np.asarray(float(place)))
        code = graph.add("Where", same, np.asarray([place], np.int64), code)
    flat = graph.add("Reshape", code, np.asarray([-1], np.int64))
    return graph.add("Gather", table, flat, axis=0)


def _quantity(graph: Graph, column: Column, fitted: Fitted) -> str:
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
