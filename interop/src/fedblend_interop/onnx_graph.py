# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A graph of ONNX operators in the making, and the values that flow through it.

A value is a constant (an array) or the name of a tensor that depends on the inputs.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedblend.errors import InputError
from fedblend.extras import require

OPSET = 18
"""The version of ONNX's operators; reductions take their axes as an input."""
ML_OPSET = 3
"""The version of the operators of ``ai.onnx.ml``."""
IR_VERSION = 9

Value = np.ndarray | str
"""A constant, or the name of a tensor."""


class ExportError(InputError):
    """A model that cannot be exported, and why: one line."""


class OnnxGraph:
    """Operators in the order in which they run, and the constants they use.

    ``rows`` is the name of a tensor of one entry, the number of rows.
    """

    def __init__(self):
        self.onnx = require("onnx", "ONNX", extra="onnx")
        self.nodes: list[Any] = []
        self.rows = ""
        self.constants: dict[str, np.ndarray] = {}
        self._known: dict[tuple, str] = {}
        self._numbers = itertools.count(1)

    def body(self) -> "OnnxGraph":
        """A graph for the inside of a loop, which has the constants of this one."""
        inside = copy.copy(self)
        inside.nodes = []
        return inside

    def name(self, prefix: str = "t") -> str:
        """A new name of a tensor."""
        return f"{prefix}{next(self._numbers)}"

    def constant(self, values: Any, dtype: Any = None) -> str:
        """The name of a constant; equal constants have the same."""
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self.name("constant")
            self.constants[self._known[key]] = array
        return self._known[key]

    def tensor(self, value: Value) -> str:
        """The name of a value."""
        return value if isinstance(value, str) else self.constant(value)

    def add(
        self,
        operator: str,
        *inputs: Value,
        outputs: int | Sequence[str] = 1,
        domain: str = "",
        **attributes: Any,
    ) -> Any:
        """Add an operator; the name of its output, or the names of several."""
        names = outputs
        if isinstance(names, int):
            names = [self.name() for _ in range(names)]
        node = self.onnx.helper.make_node(
            operator,
            [self.tensor(value) for value in inputs],
            list(names),
            domain=domain,
            **attributes,
        )
        self.nodes.append(node)
        return names[0] if len(names) == 1 else list(names)

    def element_type(self, dtype: Any) -> int:
        """ONNX's number of a dtype."""
        return self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def value_info(self, name: str, dtype: Any, shape: Sequence[Any]) -> Any:
        """The declaration of an input or output; sizes that are open have names."""
        sizes = [size if isinstance(size, int) else str(size) for size in shape]
        kind = self.element_type(dtype)
        return self.onnx.helper.make_tensor_value_info(name, kind, sizes)


Rule = Callable[[OnnxGraph, Any, list[Value]], Value | list[Value]]
"""``rule(graph, equation, inputs) -> outputs`` of a primitive."""
