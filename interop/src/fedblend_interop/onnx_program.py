# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a JAX function to ONNX operators: an interpreter over its jaxpr.

The function is traced with a symbolic number of rows, so that the file takes any. What
depends on constants alone, such as a transposed weight, is computed here and is a
constant in the file. Each primitive has a rule in ``onnx_rules`` or
``onnx_shapes``; one without is named in an error before anything is written.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.errors import InconclusiveDimensionOperation
from jax.extend.core import Literal

from fedblend.models.parts import scan_inputs
from fedblend_interop.onnx_graph import ExportError, OnnxGraph, Rule, Value
from fedblend_interop.onnx_rules import LINEAR, POINTWISE
from fedblend_interop.onnx_shapes import SHAPES, is_static

RULES: dict[str, Rule] = {**POINTWISE, **SHAPES, **LINEAR}
"""The rule of each primitive that computes something."""
MOST_ROWS = 10**12
"""Of a table."""
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
    "remat",
)
"""Primitives that only wrap a program, by its parameter "jaxpr" or "call_jaxpr"."""


def convert(
    graph: OnnxGraph, function: Callable[[Any], Any], shape: Sequence[int], dtype: Any
) -> tuple[Callable[[str], str], tuple[Any, ...]]:
    """Trace a function of rows; the first of what is returned adds it to the graph.

    Args:
        graph: where operators are added.
        function: from inputs [rows, ...] to outputs.
        shape: of one row.
        dtype: of the inputs.

    Returns:
        A function from the name of the inputs to that of the outputs, and the shape of
        the outputs.

    Raises:
        ExportError: the function uses a primitive that has no rule.
    """
    # PyTorch's slices end at 2^63 - 1, which no number of rows reaches.
    (rows,) = export.symbolic_shape("rows", constraints=[f"rows <= {MOST_ROWS}"])
    example = jax.ShapeDtypeStruct((rows, *shape), dtype)
    try:
        program = jax.make_jaxpr(function)(example)
    except (TypeError, ValueError, InconclusiveDimensionOperation) as error:
        # What the model raises for two rows, too, is not about their number.
        jax.eval_shape(function, jax.ShapeDtypeStruct((2, *shape), dtype))
        line = str(error).splitlines()[0]
        raise ExportError(
            "onnx: the model needs to know the number of rows, which an ONNX file "
            f"leaves open: {line:.120}"
        ) from None
    unknown = sorted(_unknown(program.jaxpr))
    if unknown:
        raise ExportError(
            f"onnx: the model uses {', '.join(unknown)}, which cannot be exported; "
            "--to safetensors exports every model"
        )

    def add(inputs: str) -> str:
        (output,) = run(graph, program.jaxpr, program.consts, [inputs])
        return graph.tensor(output)

    return add, program.out_avals[0].shape


def _inner(equation: Any) -> Any:
    """The program that an equation wraps, or None."""
    if equation.primitive.name not in CALLS:
        return None
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def _programs(equation: Any) -> list[Any]:
    if equation.primitive.name == "scan":
        return [equation.params["jaxpr"]]
    inner = _inner(equation)
    return [] if inner is None else [inner]


def _unknown(jaxpr: Any) -> set[str]:
    """The primitives without a rule."""
    found = set()
    for equation in jaxpr.eqns:
        inner = _programs(equation)
        for program in inner:
            found |= _unknown(getattr(program, "jaxpr", program))
        constant = not equation.invars and is_static(equation)
        if not inner and not constant and equation.primitive.name not in RULES:
            found.add(equation.primitive.name)
    return found


def run(
    graph: OnnxGraph, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Value]
) -> list[Value]:
    """Add the operators of a program to a graph; the values of its outputs."""
    values: dict[Any, Value] = {}

    def read(variable: Any) -> Value:
        if isinstance(variable, Literal):
            return np.asarray(variable.val, variable.aval.dtype)  # pyright: ignore
        return values[variable]

    values |= zip(jaxpr.constvars, map(np.asarray, constants), strict=True)
    values |= zip(jaxpr.invars, arguments, strict=True)
    for equation in jaxpr.eqns:
        found = _equation(graph, equation, [read(one) for one in equation.invars])
        values |= zip(equation.outvars, found, strict=True)
    return [read(variable) for variable in jaxpr.outvars]


def _equation(graph: OnnxGraph, equation: Any, inputs: list[Value]) -> list[Value]:
    name, inner = equation.primitive.name, _inner(equation)
    if inner is not None:
        open_jaxpr = getattr(inner, "jaxpr", inner)
        return run(graph, open_jaxpr, getattr(inner, "consts", ()), inputs)
    if name == "scan":
        return _scan(graph, equation, inputs)
    if not any(isinstance(value, str) for value in inputs) and is_static(equation):
        return _compute(equation, inputs)
    found = RULES[name](graph, equation, inputs)
    return found if isinstance(found, list) else [found]


def _compute(equation: Any, inputs: list[Value]) -> list[Value]:
    """The outputs of an equation of constants."""
    arguments = [jax.numpy.asarray(value) for value in inputs]
    found = equation.primitive.bind(*arguments, **equation.params)
    several = equation.primitive.multiple_results
    return [np.asarray(one) for one in (found if several else [found])]


def _scan(graph: OnnxGraph, equation: Any, inputs: list[Value]) -> list[Value]:
    """A loop over the first axis as ONNX's Scan, which means the same."""
    params = equation.params
    consts, carried = scan_inputs(params)
    body, program = graph.body(), params["jaxpr"]
    given = program.jaxpr.invars[consts:]
    names = [body.name("state" if i < carried else "item") for i in range(len(given))]
    inside = run(body, program.jaxpr, program.consts, [*inputs[:consts], *names])
    # An output of a body is made by an operator of the body, once.
    outputs = [body.add("Identity", value) for value in inside]
    declared = [
        body.value_info(name, variable.aval.dtype, variable.aval.shape)
        for name, variable in zip(names, given, strict=True)
    ]
    produced = [
        body.value_info(name, variable.aval.dtype, variable.aval.shape)
        for name, variable in zip(outputs, program.jaxpr.outvars, strict=True)
    ]
    scanned, direction = len(given) - carried, int(params["reverse"])
    found = graph.add(
        "Scan",
        *inputs[consts:],
        outputs=len(outputs),
        body=graph.onnx.helper.make_graph(body.nodes, "body", declared, produced),
        num_scan_inputs=scanned,
        scan_input_directions=[direction] * scanned,
        scan_output_directions=[direction] * (len(outputs) - carried),
    )
    return found if isinstance(found, list) else [found]
