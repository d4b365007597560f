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
               ``nn.GroupNorm`` of one group after an ``nn.Conv2d``; with
               norm = "batch" ``nn.BatchNorm1d`` and ``nn.BatchNorm2d``
char_rnn       ``embedding.weight``; ``rnn.weight_ih_l0``, ...: ``nn.LSTM`` or
               ``nn.GRU`` with ``batch_first``; ``last.*``
=============  =====================================================================

Two models whose outputs are mixed have ``shared.`` and ``personal.`` in front of their
names, and ``alpha``, the weight of the shared one.
"""

import re
import sys
from collections.abc import Mapping

import numpy as np

from fedblend.batch_statistics import is_statistic
from fedblend.core import PyTree
from fedblend.mixing import Blend
from fedblend.models.feedforward import Affine, Cnn, Mlp
from fedblend.trees import leaves_by_path
from fedblend_interop.onnx_graph import ExportError

Named = dict[str, np.ndarray]
KINDS = (Affine, Mlp, Cnn)
"""The models of the package that PyTorch has layers for, and ``char_rnn``."""
NAMES = (
    (r"^embedding$", "embedding.weight"),
    (r"\.scale$", ".weight"),
    (r"\.offset$", ".bias"),
    (r"^(norm\.\d+\.)mean$", r"\1running_mean"),
    (r"^(norm\.\d+\.)variance$", r"\1running_var"),
    (r"^layers\.(\d+)\.inputs\.(weight|bias)$", r"rnn.\2_ih_l\1"),
    (r"^layers\.(\d+)\.state$", r"rnn.weight_hh_l\1"),
)
"""Parts of names here, and what PyTorch calls them."""


def state_dict(model: PyTree) -> Named:
    """The parameters of a model by PyTorch's names.

    Raises:
        ExportError: there is no PyTorch layout of such a model.
    """
    if isinstance(model, Blend):
        both = {"shared": model.shared, "personal": model.personal}
        return {"alpha": np.asarray(model.alpha)} | {
            f"{place}.{name}": value
            for place, own in both.items()
            for name, value in state_dict(own).items()
        }
    if isinstance(model, Mapping):
        values = {
            str(name): value.value if is_statistic(value) else value
            for name, value in model.items()
        }
        if all(hasattr(value, "shape") for value in values.values()):
            return {name: np.asarray(value) for name, value in values.items()}
    if not (isinstance(model, KINDS) or _is_recurrent(model)):
        raise ExportError(
            f"torch: {type(model).__name__} has no layout of PyTorch; models of the "
            "package and of from_torch have one, --to safetensors exports every model"
        )
    named: Named = {}
    for path, leaf in leaves_by_path(model).items():
        name = path.replace("/", ".")
        for part, other in NAMES:
            name = re.sub(part, other, name)
        named[name] = np.asarray(leaf)
    if isinstance(model, Cnn):
        for name in ("first.weight", "second.weight"):
            named[name] = np.transpose(named[name], (3, 2, 0, 1))
        # The places of an image come before the channels here, after them in PyTorch.
        hidden, channels = named["hidden.weight"], len(named["second.weight"])
        places = hidden.reshape(len(hidden), -1, channels)
        named["hidden.weight"] = np.swapaxes(places, 1, 2).reshape(len(hidden), -1)
    if _is_recurrent(model):  # PyTorch has a second bias
        second = {
            name.replace("_ih_", "_hh_"): np.zeros_like(bias)
            for name, bias in named.items()
            if name.startswith("rnn.bias")
        }
        named |= second
    return named


def _is_recurrent(model: PyTree) -> bool:
    """Whether this is a ``char_rnn``, of a distribution that may not be installed."""
    module = sys.modules.get("fedblend_adapters.char_rnn")
    return module is not None and isinstance(model, module.CharRnn)
