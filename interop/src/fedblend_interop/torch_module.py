# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch modules as models (``from_torch``), and back (``to_torch``, ``state_dict``).

Parameters are a dictionary by the names of ``module.named_parameters()``: those that
require gradients, and the running statistics of batch normalization. Everything else,
other buffers and frozen parameters, is a constant of the model, neither trained nor
sent.

In a training step, where there is a key, the module is in training mode: dropout draws,
and batch normalization takes the statistics of the batch.
"""

import copy
import math
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.batch_statistics import Statistic
from fedblend.checks import gate
from fedblend.core import PyTree
from fedblend.errors import InputError, UserError
from fedblend.mixing import Blend
from fedblend.models.feedforward import Training
from fedblend.models.model import Model, Shape, describe
from fedblend.trees import leaves_by_path
from fedblend_interop.torch_program import (
    TorchProgram,
    example_errors,
    export_module,
    momenta_of,
    program_of,
)
from fedblend_interop.torch_training import Off, module_in_training

if TYPE_CHECKING:
    from torch import Tensor, nn

DTYPES = (np.dtype("float32"), np.dtype("float64"))
"""Of parameters."""


@gate()
def from_torch(
    source: "nn.Module | Callable[[], nn.Module]",
    example: Any,
    *,
    dropout: Off = None,
    freeze_batch_norm: bool = False,
) -> Model:
    """A model from a PyTorch module, which runs unchanged in the compiled simulation.

    Args:
        source: a module, whose present parameters are what ``init`` returns for every
            key; or a function without arguments, such as the class, that makes one:
            ``init`` then draws new parameters as the module does, seeded by the key.
        example: some rows of inputs as the module takes them, an array or a tensor; a
            tuple where the module takes several. The model takes any number of rows.
        dropout: "off" to train without the module's dropout.
        freeze_batch_norm: keep the stored statistics of batch normalization as
            constants, and normalize by them in training, too.

    Raises:
        InputError: one line, before anything runs: operators that are not supported,
            rows that depend on each other in evaluation, outputs that are no single
            tensor.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> model = from_torch(net, torch.zeros(2, 4))
        >>> sorted(model.init(jax.random.key(0)))
        ['0.bias', '0.weight']
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((3, 4))).shape
        (3, 8)
    """
    from torch import nn

    given = isinstance(source, nn.Module)
    if not given and not callable(source):
        raise UserError(
            "from_torch: source",
            source,
            "an nn.Module, or a function that makes one",
            describe(source),
        )
    rows = _example(example)
    module = _prepare(copy.deepcopy(source), rows) if given else _make(source, rows, 0)
    rows = tuple(_like_parameters(one, module) for one in rows)
    name = type(module).__name__
    trained = module_in_training(name, module, rows, dropout, freeze_batch_norm)
    start = _parameters(module)
    momenta: dict[str, float] = {}
    graphs = [export_module(name, module.eval(), rows)]
    if trained is not None:
        graphs.append(export_module(name, trained, rows))
        momenta = momenta_of(name, graphs[1])
    kept = {**start, **momenta}
    programs = [
        _assign(program_of(name, graph, momenta), module, kept) for graph in graphs
    ]
    buffers = dict(module.named_buffers())
    statistics = {path: buffers[path].cpu().numpy() for path in momenta}
    shapes = [(tuple(one.shape[1:]), _dtype(one)) for one in rows]

    def init(key):
        _refuse_precision(name, start)
        running = {
            path: Statistic(jnp.asarray(value), momenta[path])
            for path, value in statistics.items()
        }
        if given:
            return {path: jnp.asarray(value) for path, value in start.items()} | running
        kinds = {
            path: jax.ShapeDtypeStruct(value.shape, value.dtype)
            for path, value in start.items()
        }

        def draw(seed):
            return _parameters(_make(source, rows, int(seed)))

        seed = jax.random.bits(key, (), jnp.uint32)
        drawn = jax.pure_callback(draw, kinds, seed, vmap_method="sequential")
        return drawn | running

    def apply(params, inputs, key=None, mask=None):
        several = inputs if isinstance(inputs, list | tuple) else (inputs,)
        pairs = zip(several, shapes, strict=True)
        ready = (_shape_rows(one, *shape) for one, shape in pairs)
        if key is None or trained is None:
            return programs[0](params, *ready)
        return programs[1](params, *ready, now=Training(key, mask))

    return Model(init, apply)


def to_torch(params: PyTree, module: "nn.Module") -> "nn.Module":
    """A copy of the module with these parameters, in evaluation mode.

    Args:
        params: of the model that ``from_torch`` made of the module, such as
            ``run.shared`` or ``run.personal(i)``; a ``Blend`` gives a module that mixes
            the outputs of two copies.
        module: the same module, or one of the same class.
    """
    import torch

    if not isinstance(params, Blend):
        own = copy.deepcopy(module)
        own.load_state_dict(state_dict(params, module))
        return own.eval()

    class Mixture(torch.nn.Module):
        """``alpha * shared(inputs) + (1 - alpha) * personal(inputs)``."""

        def __init__(self, blend: Blend):
            super().__init__()
            self.shared = to_torch(blend.shared, module)
            self.personal = to_torch(blend.personal, module)
            self.alpha: Tensor
            self.register_buffer("alpha", torch.tensor(float(blend.alpha)))

        def forward(self, *inputs: "Tensor") -> "Tensor":
            ours = self.shared(*inputs)
            weight = self.alpha.to(ours.dtype)
            return weight * ours + (1 - weight) * self.personal(*inputs)

    return Mixture(params).eval()


def state_dict(
    params: PyTree, module: "nn.Module | None" = None
) -> "dict[str, Tensor]":
    """Parameters as tensors by name, for ``module.load_state_dict``.

    Args:
        params: of a model that ``from_torch`` made, also by the names that they have in
            a ``model.safetensors`` of fedblend, such as ``['conv1.weight']``.
        module: where the buffers, the frozen parameters and the further names of tied
            parameters come from, so that the whole module can be loaded; without one
            there are the parameters alone.

    Raises:
        InputError: the parameters are a ``Blend``, or not those of the module.
    """
    import torch

    if isinstance(params, Blend):
        raise InputError(
            "state_dict: the model mixes the outputs of two models; take the two "
            "halves (.shared, .personal), or to_torch for a module that mixes them"
        )
    if not isinstance(params, Mapping):
        raise UserError(
            "state_dict: params",
            params,
            "a dictionary by names, as a model of from_torch has",
            describe(params),
        )
    own = {
        path.removeprefix("['").removesuffix("']"): torch.from_numpy(np.array(value))
        for path, value in leaves_by_path(dict(params)).items()
    }
    if module is None:
        return own
    names = {value: path for path, value in module.named_parameters()}
    wanted = {path for path, value in module.named_parameters() if value.requires_grad}
    statistics = own.keys() & dict(module.named_buffers())
    wanted |= statistics
    if set(own) != wanted:
        odd = sorted(set(own) ^ wanted)[0]
        whose = "a parameter of the model only" if odd in own else "missing"
        raise InputError(
            f"state_dict: {odd!r} is {whose}; the module is another one, "
            f"{type(module).__name__}"
        )
    tied = dict(module.named_parameters(remove_duplicate=False))
    state: dict[str, Tensor] = dict(module.state_dict())
    state |= {path: own[path] for path in statistics}
    for path, value in tied.items():
        if names[value] in own:
            state[path] = own[names[value]]
    return state


def _example(example: Any) -> "tuple[Tensor, ...]":
    """Rows as tensors, at least two: PyTorch takes one row for a special case."""
    import torch

    several = example if isinstance(example, list | tuple) else (example,)
    rows = tuple(
        one.detach().cpu()
        if isinstance(one, torch.Tensor)
        else torch.from_numpy(np.array(one))
        for one in several
    )
    for one in rows:
        if one.ndim == 0 or len(one) == 0:
            raise UserError(
                "from_torch: example",
                example,
                "an array of rows, of at least one row",
                f"an array of shape {tuple(one.shape)}",
            )
    return tuple(torch.cat([one, one]) if len(one) == 1 else one for one in rows)


def _make(
    source: Callable[[], "nn.Module"], rows: "tuple[Tensor, ...]", seed: int
) -> "nn.Module":
    """The module of a function, drawn with this seed; PyTorch's own stays as it was."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = source()
        if not isinstance(module, torch.nn.Module):
            raise UserError(
                "from_torch: source",
                module,
                "an nn.Module, or a function that makes one",
                f"a function that returns {describe(module)}",
            )
        return _prepare(module, rows)


def _prepare(module: "nn.Module", rows: "tuple[Tensor, ...]") -> "nn.Module":
    """The module on the CPU, with the shapes of layers that find theirs at first."""
    import torch
    from torch.nn.parameter import is_lazy

    module = module.cpu()
    if any(is_lazy(one) for one in module.parameters()):
        with example_errors(module, rows), torch.no_grad():
            module(*rows)
    return module


def _like_parameters(rows: "Tensor", module: "nn.Module") -> "Tensor":
    """Rows of numbers in the dtype of the module's parameters."""
    kinds = [one.dtype for one in module.parameters() if one.is_floating_point()]
    return rows.to(kinds[0]) if kinds and rows.is_floating_point() else rows


def _dtype(tensor: "Tensor") -> np.dtype:
    return jnp.dtype(str(tensor.dtype).removeprefix("torch."))


def _parameters(module: "nn.Module") -> dict[str, np.ndarray]:
    """The parameters that are trained, by name."""
    found = {}
    for path, value in module.named_parameters():
        if value.requires_grad and _dtype(value) not in DTYPES:
            raise UserError(
                f"from_torch: {path}",
                value,
                "float32 or float64; module.float() changes it",
                f"{str(value.dtype).removeprefix('torch.')}",
            )
        if value.requires_grad:
            found[path] = value.detach().cpu().numpy()
    if not found:
        raise InputError(
            f"from_torch: {type(module).__name__} has no parameters that require "
            "gradients, so there is nothing to train"
        )
    return found


def _names(module: "nn.Module") -> dict[str, str]:
    """Every name of a parameter, with the one that ``named_parameters`` gives it."""
    first = {value: path for path, value in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {path: first[value] for path, value in every}


def _assign(
    program: TorchProgram, module: "nn.Module", trained: Container[str]
) -> TorchProgram:
    """The program with frozen parameters as constants, and tied ones under one name.

    Running statistics are among the ``trained``.
    """
    names, values = _names(module), dict(module.named_parameters())
    own = {value: names.get(name, name) for value, name in program.parameters.items()}
    frozen = {
        value: values[name].detach().cpu().numpy()
        for value, name in own.items()
        if name not in trained
    }
    kept = {value: name for value, name in own.items() if name in trained}
    constants = {**program.constants, **frozen}
    return program._replace(parameters=kept, constants=constants)


def _refuse_precision(name: str, start: Mapping[str, np.ndarray]) -> None:
    """Refuse parameters that JAX would silently round."""
    for path, value in start.items():
        if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
            raise InputError(
                f"from_torch: {name}: {path} is {value.dtype}, and JAX computes in "
                "float32; module.float(), or precision float64, makes them equal"
            )


def _shape_rows(inputs: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Rows in the shape and dtype of the example's.

    Axes of size 1 may be missing or elsewhere, channels may be last, and rows of at
    most two longer axes may be flat.
    """
    rows = jnp.asarray(inputs)
    own, long = rows.shape[1:], [size for size in shape if size != 1]
    if own != shape:
        if [size for size in own if size != 1] == long:
            rows = rows.reshape(-1, *shape)
        elif len(shape) > 2 and own == (*shape[1:], shape[0]):
            rows = jnp.moveaxis(rows, -1, 1)
        elif own == (math.prod(shape),) and len(long) <= 2:
            rows = rows.reshape(-1, *shape)
        else:
            raise UserError("from_torch: inputs", own, f"{shape}, the example's rows")
    return rows.astype(jax.dtypes.canonicalize_dtype(dtype))
