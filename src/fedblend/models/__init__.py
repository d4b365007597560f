# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models: plain JAX ones, by name or by builder, and those of other libraries.

What other libraries need is in the distribution fedblend-interop, models of text are in
fedblend-adapters: they are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

from fedblend.batch_statistics import Statistic as Statistic
from fedblend.batch_statistics import standardize as standardize
from fedblend.extras import find_elsewhere, require
from fedblend.models.derived import Ensemble as Ensemble
from fedblend.models.derived import ensemble as ensemble
from fedblend.models.derived import set_products as set_products
from fedblend.models.feedforward import cnn as cnn
from fedblend.models.feedforward import large_cnn as large_cnn
from fedblend.models.feedforward import logistic as logistic
from fedblend.models.feedforward import mlp as mlp
from fedblend.models.feedforward import softmax as softmax
from fedblend.models.model import MODELS as MODELS
from fedblend.models.model import Model as Model
from fedblend.models.model import ModelInfo as ModelInfo
from fedblend.models.model import build as build
from fedblend.models.model import model_from as model_from
from fedblend.models.parts import find_part as find_part
from fedblend.models.tabular import tabular as tabular

if TYPE_CHECKING:
    from fedblend_adapters import Prefixed as Prefixed
    from fedblend_adapters import char_rnn as char_rnn
    from fedblend_adapters import text_classifier as text_classifier
    from fedblend_adapters import transformer as transformer
    from fedblend_interop.frameworks import from_equinox as from_equinox
    from fedblend_interop.frameworks import from_flax as from_flax
    from fedblend_interop.frameworks import from_keras as from_keras
    from fedblend_interop.torch_module import from_torch as from_torch
    from fedblend_interop.torch_module import state_dict as state_dict
    from fedblend_interop.torch_module import to_torch as to_torch

_EXTRAS = dict.fromkeys(("from_torch", "state_dict", "to_torch"), "torch") | {
    "from_equinox": "models",
    "from_flax": "models",
    "from_keras": "keras",
}
"""The functions of fedblend-interop, and the extra that brings what each needs."""


def __getattr__(name: str) -> Any:
    if name in _EXTRAS:
        asked, extra = f"fb.models.{name}", _EXTRAS[name]
        interop = require("fedblend_interop.frameworks", asked, extra=extra)
        return getattr(interop, name)
    if name in ("load_transformer", "save_transformer"):
        raise AttributeError(
            f"fb.models.{name}: public weights are read by transformers, and "
            "fb.models.from_torch takes its model; see docs/transformer.md"
        )
    return find_elsewhere(__name__, name)
