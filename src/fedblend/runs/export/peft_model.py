# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter of a run as the files of ``peft``."""

from typing import Any

import jax

from fedblend.config.tables.model import loss_name, model_of
from fedblend.core import PyTree
from fedblend.errors import RunError
from fedblend.mixing import Blend, sum_of_changes
from fedblend.models.adapt.lora import Lora, lora, with_frozen
from fedblend.models.adapt.peft import ADAPTER as ADAPTER
from fedblend.models.adapt.peft import LAYOUTS, peft_files
from fedblend.runs.export.portable import Portable
from fedblend.trees import precision

GPT2 = {"positions": "learned", "norm": "layer", "bias": "all"}
LLAMA = {"positions": "rotary", "norm": "rms"}


def as_peft(portable: Portable) -> dict[str, bytes]:
    """The files of the adapter, by name; its modules are those of the model's layout.

    Raises:
        RunError: the run trained no adapter of low rank, or one of no public layout.
    """
    table = portable.config.adapt
    if table is None or table.how != "lora" or isinstance(portable.params, Blend):
        raise RunError('export: peft is for one adapter of [adapt] with how = "lora"')
    options: Any = table.options
    how, adapter = lora(**options), portable.params
    if table.two:
        adapter = sum_of_changes(adapter["shared"], adapter["personal"])
    kind = _kind(portable, adapter)
    adapter = _whole(portable, adapter, how)
    layout = None if kind is None else LAYOUTS[kind]
    return peft_files(adapter, how, layout, kind=kind, base=table.base)


def _whole(portable: Portable, adapter: PyTree, how: Lora) -> PyTree:
    """The adapter with its A, where that is no parameter."""
    if how.train == "both":
        return adapter
    config, task = portable.config, portable.task
    with precision(config.run.precision):
        plain = config.model_copy(update={"adapt": None})
        model = model_of(plain, task, loss_name(config, task))
        kind = "int32" if portable.takes_numbers else config.run.precision
        rows = jax.ShapeDtypeStruct((2, *task.shape), kind)
        return with_frozen(model, adapter, how=how, inputs=rows)


def _kind(portable: Portable, adapter: PyTree) -> str | None:
    """The layout whose names the modules have; None for a module of PyTorch."""
    options = portable.config.model.model_dump()
    gated = str(options.get("activation")).endswith("_gated")
    if options["name"] in ("transformer", "text_classifier"):
        if LLAMA.items() <= options.items() and gated:
            return "llama"
        if GPT2.items() <= options.items() and not gated:
            return "gpt2"
    elif not any("/" in path for path in adapter):
        return None
    raise RunError(
        f"export: peft has no names for the layers of {options['name']}: it is for "
        "transformers with the layers of Llama or GPT-2, and for modules of PyTorch"
    )
