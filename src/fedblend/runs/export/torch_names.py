# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters under the names and in the layout of a PyTorch ``state_dict``.

A model that came from PyTorch has its names already. Those of the package get the names
and layouts that PyTorch's own layers have:

=============  =====================================================================
softmax        ``weight``, ``bias``: an ``nn.Linear``; logistic has one output
mlp            ``hidden.0.weight``, ``hidden.0.bias``, ..., ``last.*``: ``nn.Linear``
cnn            ``first.*``, ``second.*``: ``nn.Conv2d``; ``hidden.*``, ``last.*``:
               ``nn.Linear``, whose inputs are flattened as PyTorch does, channels first
norm = true    ``norm.0.*``, ...: ``nn.LayerNorm`` after an ``nn.Linear``,
               ``nn.GroupNorm`` of one group after an ``nn.Conv2d``
char_rnn       ``embedding.weight``; ``rnn.weight_ih_l0``, ...: ``nn.LSTM`` or
               ``nn.GRU`` with ``batch_first``; ``last.*``
dual_encoder   ``embedding.weight``, ``dense.*``
=============  =====================================================================

Two models whose outputs are mixed have ``shared.`` and ``personal.`` in front of their
names, and ``alpha``, the weight of the shared one.
"""

from collections.abc import Mapping

import numpy as np

from fedblend.core import PyTree
from fedblend.mixing import Blend
from fedblend.models.char_rnn import CharRnn
from fedblend.models.dual_encoder import DualEncoder
from fedblend.models.feedforward import Affine, Cnn, Kernel, Mlp, Norm, NormCnn, NormMlp
from fedblend.runs.export.onnx_graph import ExportError

Named = dict[str, np.ndarray]


def state_dict(model: PyTree) -> Named:
    """The parameters of a model by PyTorch's names.

    Raises:
        ExportError: there is no PyTorch layout of such a model.
    """
    if isinstance(model, Blend):
        return {
            "alpha": np.asarray(model.alpha),
            **_inside("shared", state_dict(model.shared)),
            **_inside("personal", state_dict(model.personal)),
        }
    if isinstance(model, Mapping):
        values = {str(name): value for name, value in model.items()}
        if all(hasattr(value, "shape") for value in values.values()):
            return {name: np.asarray(value) for name, value in values.items()}
    for kind, named in _LAYOUTS.items():
        if isinstance(model, kind):
            return named(model)
    raise ExportError(
        f"torch: {type(model).__name__} has no layout of PyTorch; models of the "
        "package and of from_torch have one, --to safetensors exports every model"
    )


def _inside(place: str, named: Named) -> Named:
    return {f"{place}.{name}": value for name, value in named.items()}


def _affine(layer: Affine) -> Named:
    bias = {} if layer.bias is None else {"bias": np.asarray(layer.bias)}
    return {"weight": np.asarray(layer.weight), **bias}


def _norms(layers: tuple[Norm, ...]) -> Named:
    named: Named = {}
    for place, layer in enumerate(layers):
        own = {"weight": np.asarray(layer.scale), "bias": np.asarray(layer.offset)}
        named |= _inside(f"norm.{place}", own)
    return named


def _mlp(model: Mlp | NormMlp) -> Named:
    named: Named = {}
    for place, layer in enumerate(model.hidden):
        named |= _inside(f"hidden.{place}", _affine(layer))
    return named | _inside("last", _affine(model.last))


def _kernel(layer: Kernel) -> Named:
    weight = np.transpose(np.asarray(layer.weight), (3, 2, 0, 1))
    return {"weight": weight, "bias": np.asarray(layer.bias)}


def _cnn(model: Cnn | NormCnn) -> Named:
    hidden = _affine(model.hidden)
    width, channels = hidden["weight"].shape[0], model.second.weight.shape[-1]
    # The places of an image come before the channels here, and after them in PyTorch.
    places = hidden["weight"].reshape(width, -1, channels)
    hidden["weight"] = np.swapaxes(places, 1, 2).reshape(width, -1)
    return {
        **_inside("first", _kernel(model.first)),
        **_inside("second", _kernel(model.second)),
        **_inside("hidden", hidden),
        **_inside("last", _affine(model.last)),
    }


def _char_rnn(model: CharRnn) -> Named:
    named = {"embedding.weight": np.asarray(model.embedding)}
    for place, layer in enumerate(model.layers):
        bias = np.asarray(layer.inputs.bias)
        named |= {
            f"rnn.weight_ih_l{place}": np.asarray(layer.inputs.weight),
            f"rnn.weight_hh_l{place}": np.asarray(layer.state),
            f"rnn.bias_ih_l{place}": bias,
            f"rnn.bias_hh_l{place}": np.zeros_like(bias),
        }
    return named | _inside("last", _affine(model.last))


def _dual_encoder(model: DualEncoder) -> Named:
    embedding = {"embedding.weight": np.asarray(model.embedding)}
    return embedding | _inside("dense", _affine(model.dense))


_LAYOUTS = {
    Affine: _affine,
    Mlp: _mlp,
    NormMlp: lambda model: _mlp(model) | _norms(model.norm),
    Cnn: _cnn,
    NormCnn: lambda model: _cnn(model) | _norms(model.norm),
    CharRnn: _char_rnn,
    DualEncoder: _dual_encoder,
}
