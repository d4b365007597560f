# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A module of PyTorch as a list of steps in JAX.

The steps are those of ``torch.export``, for any number of rows: a size that depends on
it is computed from the shapes of the inputs. Every value has the dtype that it has in
PyTorch, as far as JAX's precision allows.

A module has one program for evaluation, and one for training if that is another one.
Running statistics of batch normalization are parameters of both; other buffers are
constants.
"""

import logging
import operator
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree
from fedblend.errors import InputError
from fedblend.models.feedforward import Training
from fedblend_interop.torch_layers import IN_TRAINING, LAYERS, SEQUENCES
from fedblend_interop.torch_operators import POINTWISE, SHAPES

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram
    from torch.fx import Node

OPERATORS = {**POINTWISE, **SHAPES, **LAYERS, **SEQUENCES, **IN_TRAINING}
"""What JAX computes for an operator of ATen, by its name."""
WHOLE = (
    *("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"),
    *("linear.default", "scaled_dot_product_attention.default"),
)
"""Operators that are not taken apart: a loop over time would be written out."""
IGNORED = ("dtype", "layout", "device", "pin_memory", "memory_format", "generator")
"""Keywords of operators: a value's dtype is known anyway, the rest is of PyTorch."""
ONE = "(Tensor x) -> Tensor"
CHECKS = ("_assert_", "sym_constrain_range", "_assert_scalar", "_assert_tensor")
"""Operators that compute nothing."""


class Reference(NamedTuple):
    """A value that an earlier step computed."""

    name: str


class TorchStep(NamedTuple):
    """One operator: its result's name, its function and arguments, its dtypes."""

    name: str
    function: Callable[..., PyTree]
    arguments: Any
    keywords: Mapping[str, Any]
    dtypes: Any
    trains: bool
    """Whether the function has key and mask of a training step ahead of the rest."""


EVALUATION = Training()


class TorchProgram(NamedTuple):
    """The steps from parameters, constants and inputs to the outputs."""

    inputs: tuple[str, ...]
    parameters: Mapping[str, str]
    """By the names of values: which parameters, or running statistics, they are."""
    constants: Mapping[str, np.ndarray]
    steps: tuple[TorchStep, ...]
    output: str

    def __call__(
        self, params: Mapping[str, Any], *inputs: jax.Array, now: Training = EVALUATION
    ):
        """The outputs of the module with these parameters."""
        known: dict[str, Any] = dict(zip(self.inputs, inputs, strict=True))
        known |= {name: params[own] for name, own in self.parameters.items()}
        known |= {name: jnp.asarray(one) for name, one in self.constants.items()}
        with jax.numpy_rank_promotion("allow"):  # as PyTorch does
            for place, step in enumerate(self.steps):
                function = step.function
                if step.trains and now.key is not None:
                    own = now._replace(key=jax.random.fold_in(now.key, place))
                    function = partial(function, own)
                elif step.trains:
                    function = partial(function, now)
                values = function(
                    *_resolve(step.arguments, known), **_resolve(step.keywords, known)
                )
                known[step.name] = _cast(values, step.dtypes)
        return known[self.output]


def _resolve(value: Any, known: Mapping[str, Any]) -> Any:
    """Arguments with the values that they refer to."""

    def is_reference(one: Any) -> bool:
        return isinstance(one, Reference)

    return jax.tree.map(
        lambda one: known[one.name] if is_reference(one) else one,
        value,
        is_leaf=is_reference,
    )


def _cast(value: Any, dtype: Any) -> Any:
    """The value with the dtype of PyTorch; sizes stay numbers of Python."""
    if isinstance(dtype, tuple):
        return [_cast(*pair) for pair in zip(value, dtype, strict=False)]
    if value is None or dtype is None:
        return value
    return jnp.asarray(value, jax.dtypes.canonicalize_dtype(dtype))


def decompositions() -> "dict[Any, Callable[..., Any]]":
    """The operators that are taken apart, and how."""
    import torch

    table = torch.export.default_decompositions()
    for operation in WHOLE:
        base, overload = operation.split(".")
        table.pop(getattr(getattr(torch.ops.aten, base), overload), None)
    return table


def export_module(
    name: str, module: "nn.Module", example: tuple["Tensor", ...]
) -> "ExportedProgram":
    """The graph of a module for any number of rows, in ATen's core operators."""
    import torch

    rows = torch.export.Dim.DYNAMIC
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    logging.disable(logging.CRITICAL)  # pages about what becomes one line here
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            graph = torch.export.export(
                module, example, dynamic_shapes=tuple({0: rows} for _ in example)
            )
            _mark_detached(graph)
            return graph.run_decompositions(decompositions())
    except Exception as error:
        raise InputError(f"from_torch: {name} {_why(error)}") from None
    finally:
        logging.disable(logging.NOTSET)
        torch.backends.mha.set_fastpath_enabled(fast)


def _mark_detached(graph: "ExportedProgram") -> None:
    """Put an operator of fedblend's own where gradients stop in a graph.

    Taking a graph apart forgets ``detach`` and ``no_grad``.
    """
    import torch

    name = "fedblend::stop_gradient"
    if not hasattr(torch.ops.fedblend, "stop_gradient"):
        own = torch.library.custom_op(name, torch.clone, mutates_args=(), schema=ONE)
        own.register_fake(torch.empty_like)
    stop = torch.ops.fedblend.stop_gradient.default
    nodes = graph.graph
    for node in list(nodes.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.target = stop
        if str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False:
            for given in node.args[2:]:  # after the flag and the graph inside
                with nodes.inserting_before(node):
                    stopped = nodes.call_function(stop, (given,))
                stopped.meta = dict(given.meta)
                node.replace_input_with(given, stopped)
    graph.graph_module.recompile()


def _why(error: Exception) -> str:
    """Why a module has no graph, in one line."""
    kind = type(error).__name__
    text = " ".join(str(error).split())
    if "DataDependent" in kind or "data-dependent" in text:
        return (
            "branches on values of its inputs, and compiled code has no such branch; "
            "torch.where chooses between values"
        )
    if "specialized" in text or "ConstraintViolation" in kind:
        return (
            "works for one number of rows only, that of the example; sizes must follow "
            "inputs.shape[0], and not len(inputs)"
        )
    return f"cannot be traced by torch.export: {kind}: {text[:300]}"


def momenta_of(name: str, graph: "ExportedProgram") -> dict[str, float]:
    """The running statistics that a graph moves, by path, and how fast they follow.

    Raises:
        InputError: it writes to other buffers, or twice to one.
    """
    signature = graph.graph_signature
    found: dict[str, float] = {}
    for node in graph.graph.nodes:
        if "batch_norm_legit_functional" in str(node.target):
            for statistic in node.args[3:5]:
                own = signature.inputs_to_buffers.get(statistic.name)
                if own is None:
                    raise InputError(
                        f"from_torch: {name} uses a batch normalization twice"
                        f"{_place(node)}, and its statistics would follow both; give "
                        "each place a layer of its own, or freeze_batch_norm=True"
                    )
                found[own] = node.args[6]
    for path in signature.buffers_to_mutate.values():
        if path not in found and not path.endswith("num_batches_tracked"):
            raise InputError(
                f"from_torch: {name} writes to its buffer {path!r}; only parameters "
                "and statistics of batch normalization can be mixed and averaged"
            )
    return found


def program_of(
    name: str, graph: "ExportedProgram", statistics: Container[str] = ()
) -> TorchProgram:
    """The steps of a graph.

    Args:
        name: of the module.
        graph: of it.
        statistics: paths of the buffers that are parameters of the model.

    Raises:
        InputError: it has operators that are not among those of ``OPERATORS``, or other
            outputs than one array.
    """
    signature = graph.graph_signature
    nodes = list(graph.graph.nodes)
    called = [node for node in nodes if node.op == "call_function"]
    _refuse_sizes_from_values(name, called)
    _refuse_unknown(name, called)
    output = _output(name, graph)
    shape = output.meta["val"].shape
    inputs = tuple(map(str, signature.user_inputs))
    first = next(one for one in nodes if one.name == inputs[0])
    if not len(shape) or shape[0] != first.meta["val"].shape[0]:
        sizes = ", ".join("rows" if "s" in str(one) else str(one) for one in shape)
        raise InputError(
            f"from_torch: {name} returns a tensor of shape ({sizes}); the first axis "
            "of inputs and outputs is that of the rows"
        )
    buffers = signature.inputs_to_buffers
    moving = {value: path for value, path in buffers.items() if path in statistics}
    known = {**graph.constants, **graph.state_dict}
    fixed = {**buffers, **signature.inputs_to_lifted_tensor_constants}
    return TorchProgram(
        inputs,
        {**signature.inputs_to_parameters, **moving},
        {
            value: known[own].detach().cpu().numpy()
            for value, own in fixed.items()
            if value not in moving
        },
        tuple(_step(node) for node in called if not _is_check(node)),
        output.name,
    )


def _output(name: str, graph: "ExportedProgram") -> "Node":
    """The scores that a module returns, alone or as "logits" of a dictionary."""
    from torch.utils import _pytree

    names = graph.graph_signature.user_outputs
    known = {node.name: node for node in graph.graph.nodes}
    shape: Any = graph.call_spec.out_spec
    found: Any = _pytree.tree_unflatten(list(names), shape)
    if isinstance(found, Mapping) and ("logits" in found or len(found) == 1):
        found = found.get("logits", next(iter(found.values())))
    if found not in names:
        raise InputError(
            f"from_torch: {name} returns {len(names)} values; a model returns one "
            'tensor, with the scores of each row, or a dictionary with "logits"'
        )
    return known[found]


def _names(node: "Node") -> Iterator[str]:
    """By which a step may be known: with its overload, and without."""
    name = getattr(node.target, "name", lambda: str(node.target))()
    whole = name.partition("::")[2] or name
    yield whole
    yield whole.partition(".")[0]


def _is_check(node: "Node") -> bool:
    return any(name.startswith(CHECKS) for name in _names(node))


def _function(node: "Node") -> Callable[..., PyTree] | None:
    target: Any = node.target
    own = getattr(target, "__module__", "")
    if own in ("_operator", "math") or target is operator.getitem:
        return target
    if getattr(target, "__name__", "").startswith("sym_") and own == "torch":
        return target  # of numbers of Python here
    return next((OPERATORS[one] for one in _names(node) if one in OPERATORS), None)


def _refuse_sizes_from_values(name: str, called: Sequence["Node"]) -> None:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in called:
        value = node.meta.get("val")
        if value is not None and free_unbacked_symbols(value):
            raise InputError(
                f"from_torch: {name} makes a number or a size from the values of its "
                f"inputs, by {node.target}{_place(node)}; compiled code has the same "
                "shapes for all inputs, torch.where chooses between values"
            )


def _refuse_unknown(name: str, called: Sequence["Node"]) -> None:
    found: dict[str, str] = {}
    for node in called:
        if _function(node) is None and not _is_check(node):
            found.setdefault(str(node.target), _place(node))
    if found:
        listed = ", ".join(f"{one}{place}" for one, place in found.items())
        raise InputError(
            f"from_torch: {name} uses operators that fedblend cannot run: {listed}"
        )


def _place(node: "Node") -> str:
    """The layer that a step belongs to."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else kind.__name__
    where = f" at {path!r}" if path else ""
    return f" (in {kind.rpartition('.')[2]}{where})"


def _step(node: "Node") -> TorchStep:
    from torch import dtype, fx

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Reference(value.name)
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return value

    arguments = [plain(one) for one in node.args if not isinstance(one, dtype)]
    keywords = {
        key: plain(value) for key, value in node.kwargs.items() if key not in IGNORED
    }
    function = _function(node)
    assert function is not None
    dtypes = _dtypes(node.meta["val"])
    trains = any(one in IN_TRAINING for one in _names(node))
    return TorchStep(node.name, function, arguments, keywords, dtypes, trains)


def _dtypes(value: Any) -> Any:
    """The dtypes of what PyTorch computes there; None for sizes."""
    if isinstance(value, list | tuple):
        return tuple(_dtypes(one) for one in value)
    kind = getattr(value, "dtype", None)
    return None if kind is None else jnp.dtype(str(kind).removeprefix("torch."))


class ExampleError(InputError):
    """A module does not take the rows of the example."""


@contextmanager
def example_errors(
    module: "nn.Module", example: tuple["Tensor", ...]
) -> Iterator[None]:
    """Errors of running a module on the example inside, as an ``ExampleError``."""
    try:
        yield
    except Exception as error:
        sizes = " and ".join(str(tuple(one.shape)) for one in example)
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ExampleError(
            f"from_torch: {type(module).__name__} does not take the example, of shape "
            f"{sizes}: {why}"
        ) from None
