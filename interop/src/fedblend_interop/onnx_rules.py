# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Primitives that compute as ONNX operators: entry by entry, reductions, products."""

import string
from typing import Any

import numpy as np

from fedblend_interop.onnx_graph import ExportError, OnnxGraph, Rule, Value
from fedblend_interop.onnx_shapes import apart, ints

SAME = {
    "add": "Add",
    "add_any": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "max": "Max",
    "min": "Min",
    "pow": "Pow",
    "neg": "Neg",
    "abs": "Abs",
    "sign": "Sign",
    "exp": "Exp",
    "log": "Log",
    "tanh": "Tanh",
    "logistic": "Sigmoid",
    "sqrt": "Sqrt",
    "erf": "Erf",
    "sin": "Sin",
    "cos": "Cos",
    "floor": "Floor",
    "ceil": "Ceil",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "eq": "Equal",
    "and": "And",
    "or": "Or",
    "xor": "Xor",
    "not": "Not",
    "stop_gradient": "Identity",
    "copy": "Identity",
    "copy_p": "Identity",
    "optimization_barrier": "Identity",
}
"""Primitives that ONNX has under another name."""
REDUCTIONS = {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
}


def _same(operator: str) -> Rule:
    return lambda graph, equation, inputs: graph.add(operator, *inputs)


def _one(equation):
    return np.ones((), equation.outvars[0].aval.dtype)


def _integer_pow(graph, equation, inputs):
    exponent = np.asarray(equation.params["y"], equation.outvars[0].aval.dtype)
    return graph.add("Pow", inputs[0], exponent)


def _is_finite(graph, equation, inputs):
    unusual = graph.add("IsNaN", inputs[0]), graph.add("IsInf", inputs[0])
    return graph.add("Not", graph.add("Or", *unusual))


def _select(graph, equation, inputs):
    """The second of two cases where the condition holds, else the first."""
    which, *cases = inputs
    if np.dtype(equation.invars[0].aval.dtype) == bool:
        return graph.add("Where", which, cases[1], cases[0])
    found = cases[0]
    for number, case in enumerate(cases[1:], start=1):
        chosen = graph.add("Equal", which, np.asarray(number, np.int32))
        found = graph.add("Where", chosen, case, found)
    return found


def _cast(graph, equation, inputs):
    kind = graph.element_type(equation.outvars[0].aval.dtype)
    return graph.add("Cast", inputs[0], to=kind)


def _reduction(operator: str) -> Rule:
    def rule(graph, equation, inputs):
        axes = ints(*equation.params["axes"])
        if not axes.size:
            return inputs[0]
        return graph.add(operator, inputs[0], axes, keepdims=0)

    return rule


def _largest(operator: str) -> Rule:
    def rule(graph, equation, inputs):
        (axis,) = equation.params["axes"]
        found = graph.add(operator, inputs[0], axis=axis, keepdims=0)
        kind = graph.element_type(equation.outvars[0].aval.dtype)
        return graph.add("Cast", found, to=kind)

    return rule


def _cumsum(graph, equation, inputs):
    axis = np.asarray(equation.params["axis"], np.int64)
    back = int(equation.params["reverse"])
    return graph.add("CumSum", inputs[0], axis, reverse=back)


POINTWISE: dict[str, Rule] = {
    **{name: _same(operator) for name, operator in SAME.items()},
    **{name: _reduction(operator) for name, operator in REDUCTIONS.items()},
    "log1p": lambda g, e, x: g.add("Log", g.add("Add", x[0], _one(e))),
    "expm1": lambda g, e, x: g.add("Sub", g.add("Exp", x[0]), _one(e)),
    "erfc": lambda g, e, x: g.add("Sub", _one(e), g.add("Erf", x[0])),
    "rsqrt": lambda g, e, x: g.add("Reciprocal", g.add("Sqrt", x[0])),
    "square": lambda g, e, x: g.add("Mul", x[0], x[0]),
    "integer_pow": _integer_pow,
    "ne": lambda g, e, x: g.add("Not", g.add("Equal", *x)),
    "is_finite": _is_finite,
    "select_n": _select,
    "clamp": lambda g, e, x: g.add("Min", g.add("Max", x[1], x[0]), x[2]),
    "convert_element_type": _cast,
    "round": lambda g, e, x: g.add("Round", x[0]),  # halves to even
    "argmax": _largest("ArgMax"),
    "argmin": _largest("ArgMin"),
    "cumsum": _cumsum,
}


def _dot(graph, equation, inputs):
    """A product: MatMul where two matrices are multiplied, else Einsum."""
    summed, batched = equation.params["dimension_numbers"]
    left, right = (len(variable.aval.shape) for variable in equation.invars)
    plain = tuple(summed[0]) == (left - 1,) and not batched[0]
    if plain and right == 2 and tuple(summed[1]) == (0,):
        return graph.add("MatMul", *inputs)
    letters = string.ascii_lowercase
    ours, theirs = list(letters[:left]), list(letters[left : left + right])
    for pairs in (summed, batched):
        for at, beside in zip(*pairs, strict=True):
            theirs[beside] = ours[at]
    common = [ours[at] for at in batched[0]]
    gone = {*common, *(ours[at] for at in summed[0])}
    free = [one for one in (*ours, *theirs) if one not in gone]
    text = f"{''.join(ours)},{''.join(theirs)}->{''.join([*common, *free])}"
    return graph.add("Einsum", *inputs, equation=text)


def _convolution(graph, equation, inputs):
    """A convolution, with the axes in the order that ONNX knows."""
    params = equation.params
    if params["batch_group_count"] != 1:
        raise ExportError("onnx: a convolution in groups of rows cannot be exported")
    numbers = params["dimension_numbers"]
    edges = [low for low, _ in params["padding"]]
    edges += [high for _, high in params["padding"]]
    if min(edges, default=0) < 0:
        raise ExportError(
            "onnx: a convolution with negative padding cannot be exported"
        )
    images = _reorder(graph, inputs[0], numbers.lhs_spec)
    shape = [equation.invars[0].aval.shape[axis] for axis in numbers.lhs_spec]
    for axis, gap in enumerate(params["lhs_dilation"], start=2):
        images, shape[axis] = apart(graph, images, shape, axis, gap)
    found = graph.add(
        "Conv",
        images,
        _reorder(graph, inputs[1], numbers.rhs_spec),
        strides=list(params["window_strides"]),
        pads=edges,
        dilations=list(params["rhs_dilation"]),
        group=params["feature_group_count"],
    )
    return _reorder(graph, found, np.argsort(numbers.out_spec))


def _reorder(graph: OnnxGraph, value: Value, order: Any) -> Value:
    order = [int(axis) for axis in order]
    if order == list(range(len(order))):
        return value
    if not isinstance(value, str):
        return np.transpose(value, order)
    return graph.add("Transpose", value, perm=order)


def _pooling(operator: str) -> Rule:
    """The maximum, or the sum, of windows over the axes after rows and channels."""

    def rule(graph, equation, inputs):
        params = equation.params
        window, strides = params["window_dimensions"], params["window_strides"]
        padding = params["padding"]
        rank = len(window)
        inside = [at for at in range(rank) if window[at] != 1 or strides[at] != 1]
        dilated = [*params["base_dilation"], *params["window_dilation"]]
        if any(size != 1 for size in dilated) or rank - len(inside) != 2:
            raise ExportError(
                f"onnx: {equation.primitive.name} cannot be exported in this form"
            )
        order = [at for at in range(rank) if at not in inside] + inside
        edges = [padding[at][0] for at in inside] + [padding[at][1] for at in inside]
        more: dict[str, Any] = (
            {"count_include_pad": 1} if operator == "AveragePool" else {}
        )
        found = graph.add(
            operator,
            _reorder(graph, inputs[0], order),
            kernel_shape=[int(window[at]) for at in inside],
            strides=[int(strides[at]) for at in inside],
            pads=[int(edge) for edge in edges],
            **more,
        )
        if operator == "AveragePool":
            size = np.prod([window[at] for at in inside])
            factor = np.asarray(size, equation.outvars[0].aval.dtype)
            found = graph.add("Mul", found, factor)
        return _reorder(graph, found, np.argsort(order))

    return rule


LINEAR: dict[str, Rule] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "reduce_window_max": _pooling("MaxPool"),
    "reduce_window_sum": _pooling("AveragePool"),
}
