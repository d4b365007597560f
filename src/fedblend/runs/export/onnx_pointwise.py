# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Primitives that compute entry by entry, and reductions, as ONNX operators."""

from typing import Any

import numpy as np

from fedblend.runs.export.onnx_graph import Graph, Rule, Value

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


def _one(equation: Any) -> np.ndarray:
    return np.ones((), equation.outvars[0].aval.dtype)


def _log1p(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    return graph.add("Log", graph.add("Add", inputs[0], _one(equation)))


def _expm1(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    return graph.add("Sub", graph.add("Exp", inputs[0]), _one(equation))


def _erfc(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    return graph.add("Sub", _one(equation), graph.add("Erf", inputs[0]))


def _rsqrt(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    return graph.add("Reciprocal", graph.add("Sqrt", inputs[0]))


def _square(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    return graph.add("Mul", inputs[0], inputs[0])


def _integer_pow(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    exponent = np.asarray(equation.params["y"], equation.outvars[0].aval.dtype)
    return graph.add("Pow", inputs[0], exponent)


def _not_equal(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    return graph.add("Not", graph.add("Equal", *inputs))


def _is_finite(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    unusual = graph.add("IsNaN", inputs[0]), graph.add("IsInf", inputs[0])
    return graph.add("Not", graph.add("Or", *unusual))


def _select(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    """The second of two cases where the condition holds, else the first."""
    which, *cases = inputs
    if np.dtype(equation.invars[0].aval.dtype) == bool:
        return graph.add("Where", which, cases[1], cases[0])
    found = cases[0]
    for number, case in enumerate(cases[1:], start=1):
        chosen = graph.add("Equal", which, np.asarray(number, np.int32))
        found = graph.add("Where", chosen, case, found)
    return found


def _clamp(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    low, value, high = inputs
    return graph.add("Min", graph.add("Max", value, low), high)


def _cast(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    kind = graph.element_type(equation.outvars[0].aval.dtype)
    return graph.add("Cast", inputs[0], to=kind)


def _round(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    """To the nearest; halves to even, which is what models use."""
    return graph.add("Round", inputs[0])


def _reduction(operator: str) -> Rule:
    def rule(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
        axes = np.asarray(equation.params["axes"], np.int64)
        if not axes.size:
            return inputs[0]
        return graph.add(operator, inputs[0], axes, keepdims=0)

    return rule


def _largest(operator: str) -> Rule:
    def rule(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
        (axis,) = equation.params["axes"]
        found = graph.add(operator, inputs[0], axis=axis, keepdims=0)
        kind = graph.element_type(equation.outvars[0].aval.dtype)
        return graph.add("Cast", found, to=kind)

    return rule


def _cumsum(graph: Graph, equation: Any, inputs: list[Value]) -> Value:
    axis = np.asarray(equation.params["axis"], np.int64)
    back = int(equation.params["reverse"])
    return graph.add("CumSum", inputs[0], axis, reverse=back)


POINTWISE: dict[str, Rule] = {
    **{name: _same(operator) for name, operator in SAME.items()},
    **{name: _reduction(operator) for name, operator in REDUCTIONS.items()},
    "log1p": _log1p,
    "expm1": _expm1,
    "erfc": _erfc,
    "rsqrt": _rsqrt,
    "square": _square,
    "integer_pow": _integer_pow,
    "ne": _not_equal,
    "is_finite": _is_finite,
    "select_n": _select,
    "clamp": _clamp,
    "convert_element_type": _cast,
    "round": _round,
    "argmax": _largest("ArgMax"),
    "argmin": _largest("ArgMin"),
    "cumsum": _cumsum,
}
