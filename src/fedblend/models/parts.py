# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The usual parts of a model, found in what it computes: head, biases, normalization.

Names of parameters say little ("2.weight"), and the order of a dictionary is that of
the alphabet. What a parameter does when it first meets the data tells more: it is
multiplied as a matrix (a weight), multiplied entry by entry (the scale of a
normalization layer), or added (a bias). The head is the layer whose weight comes last.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from fedblend.checks import words
from fedblend.core import PyTree
from fedblend.errors import SettingError
from fedblend.models.model import Model
from fedblend.trees import leaves_by_path

PARTS = ("head", "body", "biases", "normalization")
"""The parts that have a name."""
_DATA = None
"""In place of the parameters that a value is made of, if it depends on the inputs."""
_INSIDE = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class _Use(NamedTuple):
    """Where in the program a parameter meets the data, and in which operation."""

    place: int
    operation: str


def find_part(model: Model, inputs: PyTree, part: str) -> list[str]:
    """The paths of the parameters that are a part of a model.

    Args:
        model: any, of this package or of another framework.
        inputs: some rows, or their shapes; they are not computed with.
        part: "head" for the last layer, "body" for all others, "biases" for what is
            added to activations, "normalization" for layers that scale them.

    Raises:
        SettingError: the model has no such part, or nothing besides.

    Example:
        >>> import jax.numpy as jnp
        >>> from fedblend.models import mlp
        >>> find_part(mlp(4, 3, hidden=(8,)), jnp.ones((2, 4)), "head")
        ['last/bias', 'last/weight']
    """
    words(*PARTS)("find_part: part", part)
    params = jax.eval_shape(model.init, jax.random.key(0))
    uses = _uses(model, params, inputs)
    scaled = {layer_of(path) for path, use in uses.items() if use.operation == "mul"}
    matrices = {
        path: use
        for path, use in uses.items()
        if use.operation not in ("mul", "add", "sub") and layer_of(path) not in scaled
    }
    last = max(matrices, key=lambda path: matrices[path].place, default="")
    head = {path for path in uses if last and layer_of(path) == layer_of(last)}
    found = {
        "head": head,
        "body": set(uses) - head if head else set(),
        "biases": {path for path, use in uses.items() if use.operation == "add"},
        "normalization": {path for path in uses if layer_of(path) in scaled},
    }[part]
    if not found or len(found) == len(uses):
        what = "has no" if not found else "is nothing but its"
        names = ", ".join(uses)
        why = f"the model {what} {part}; its parameters are {names}"
        raise SettingError("find_part: part", why)
    return sorted(found)


def layer_of(path: str) -> str:
    """The layer of a parameter: its path, less the last name."""
    return re.sub(r"(^|[/.])[^/.]*$", "", path)


def operations_of(model: Model, params: PyTree, inputs: PyTree) -> dict[str, str]:
    """The operation in which each parameter first meets the data, by path.

    Args:
        model: any.
        params: its parameters, or their shapes.
        inputs: some rows, or their shapes.
    """
    found = _uses(model, params, inputs)
    return {path: use.operation for path, use in found.items()}


def _uses(model: Model, params: PyTree, inputs: PyTree) -> dict[str, _Use]:
    """What the model does with each of its parameters, by path."""
    paths = list(leaves_by_path(params))
    program = jax.make_jaxpr(model.apply)(params, inputs).jaxpr
    first: dict[int, _Use] = {}
    rest = [_DATA] * (len(program.invars) - len(paths))
    _follow(program, [*({place} for place in range(len(paths))), *rest], first)
    return {path: first.get(place, _Use(0, "")) for place, path in enumerate(paths)}


def _follow(program: Any, given: Sequence[set[int] | None], first: dict[int, _Use]):
    """What the outputs are made of; notes in ``first`` where parameters meet data."""
    made = dict(zip(program.invars, given, strict=True))
    made |= {constant: set() for constant in program.constvars}
    for step in program.eqns:
        known = [
            set() if isinstance(one, Literal) else made[one] for one in step.invars
        ]
        outputs = _enter(step, known, first)
        if outputs is None:
            of = set().union(*(one for one in known if one is not None))
            if _DATA in known:
                for place in of:
                    use = _Use(len(first), step.primitive.name)
                    first.setdefault(place, use)
            outputs = [_DATA if _DATA in known else of] * len(step.outvars)
        made |= dict(zip(step.outvars, outputs, strict=True))
    return [set() if isinstance(one, Literal) else made[one] for one in program.outvars]


def _enter(step: Any, known: list, first: dict[int, _Use]) -> list | None:
    """The same for a step that is a program itself; None if it is none."""
    inner = next((step.params[key] for key in _INSIDE if key in step.params), None)
    inner = getattr(inner, "jaxpr", inner)
    if inner is None or len(inner.invars) != len(known):
        return None
    if step.primitive.name == "scan" and _DATA in known:
        # A state that begins as a constant depends on the data after the first step.
        constants, states = scan_inputs(step.params)
        known = [
            _DATA if constants <= place < constants + states else one
            for place, one in enumerate(known)
        ]
    return _follow(inner, known, first)


def scan_inputs(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan stay the same, and how many are carried on.

    Args:
        params: those of the jaxpr's equation.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since JAX 0.11: trees of the inputs that stay, are carried on, are looped over.
    same, carried, _ = params["ft_in"].unpack()
    return len(same.vals), len(carried.vals)
