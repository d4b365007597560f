# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Writing the models of a run as files, each with a model card beside it."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax

from fedblend.config.tables.model import loss_name, model_of
from fedblend.core import PyTree
from fedblend.data.dataset import require
from fedblend.errors import RunError, UserError
from fedblend.mixing import Blend, sum_of_changes
from fedblend.models.adapt.kinds import Lora, lora, with_frozen
from fedblend.models.interop.peft import ADAPTER, peft_files
from fedblend.runs.export.portable import (
    Portable,
    as_npz,
    as_safetensors,
    read_portable,
)
from fedblend.runs.model_card import model_card
from fedblend.runs.run_folder import file_words, write_text
from fedblend.runs.saved_run import SavedRun
from fedblend.simulation.serialize import pack_named, write_atomically
from fedblend.trees import precision


def _onnx(portable: Portable) -> bytes:
    interop = require(
        "fedblend_interop.onnx_file", "export: onnx", "fedblend-interop", "onnx"
    )
    return interop.onnx_file(
        portable.params,
        portable.apply,
        portable.task,
        preprocessing=portable.preprocessing,
        numbers=portable.takes_numbers,
        probable=portable.probable,
        about=portable.metadata(),
    )


def _torch(portable: Portable) -> bytes:
    interop = require(
        "fedblend_interop.torch_names", "export: torch", "fedblend-interop", "torch"
    )
    facts, task = {**portable.facts, "format": "pt"}, portable.task
    if (task.center, task.scale) != (0, 1):
        facts |= {"center": str(task.center), "scale": str(task.scale)}
    if task.log_shift is not None:
        facts["log_shift"] = str(task.log_shift)
    return pack_named(interop.state_dict(portable.params), facts)


def as_peft(portable: Portable) -> dict[str, bytes]:
    """The adapter of a run as the files of ``peft``, by name.

    Raises:
        RunError: the run trained no adapter of low rank, or none of a PyTorch module.
    """
    table, name = portable.config.adapt, portable.config.model.name
    if table is None or table.how != "lora" or isinstance(portable.params, Blend):
        raise RunError('export: peft is for one adapter of [adapt] with how = "lora"')
    options: Any = table.options
    how, adapter = lora(**options), portable.params
    if table.two:
        adapter = sum_of_changes(adapter["shared"], adapter["personal"])
    if any("/" in path for path in adapter):
        raise RunError(
            f"export: peft has no names for the layers of {name}: it is for modules of "
            "PyTorch"
        )
    return peft_files(_whole(portable, adapter, how), how, base=table.base)


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


class Target(NamedTuple):
    """A format: how a file ends, and how it is made."""

    suffix: str
    make: Callable[[Portable], bytes | dict[str, bytes]]
    """The file; or several by name, which a folder has."""


FORMATS = {
    "safetensors": Target(".safetensors", as_safetensors),
    "npz": Target(".npz", as_npz),
    "onnx": Target(".onnx", _onnx),
    "torch": Target(".torch.safetensors", _torch),
    "peft": Target(".peft", as_peft),
}
"""The formats of exported models, by name."""


def export_models(
    run: SavedRun,
    out: Path,
    *,
    to: str = "safetensors",
    clients: Sequence[int | str] = (),
    shared: bool = False,
    seed: int | None = None,
) -> list[Path]:
    """Write models of a run, each with its card; earlier exports are replaced.

    Args:
        run: a finished run.
        out: the folder of the files.
        to: "safetensors", "npz", "onnx", "torch" or, for adapters, "peft".
        clients: whose models, by id or name.
        shared: whether the shared model is written, too.
        seed: which seed of the run; the first if None.

    Returns:
        The files of the models, folders for "peft"; each has its card beside it, which
        ends in ``.md``.
    """
    if to not in FORMATS:
        raise UserError("to", to, f"one of {', '.join(FORMATS)}")
    chosen: list[int | None] = [None] if shared else []
    chosen += dict.fromkeys(run.client_id(client) for client in clients)
    words = [f"client-{word}" for word in file_words(run.names)]
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for client in chosen:
        portable = run.model(client, seed)
        data = FORMATS[to].make(portable)
        stem = "shared" if client is None else words[client]
        path = out / f"{stem}{FORMATS[to].suffix}"
        if isinstance(data, bytes):
            write_atomically(path, data)
            weights = data
        else:
            path.mkdir(exist_ok=True)
            for name, content in data.items():
                write_atomically(path / name, content)
            weights = data[ADAPTER]
        digest = hashlib.sha256(weights).hexdigest()
        seed_used = int(portable.facts["seed"])
        card = model_card(run, client, seed_used, path.name, digest)
        write_text(path.with_name(f"{path.name}.md"), card)
        paths.append(path)
    return paths


def export_file(path: Path, out: Path, to: str, *, imports: bool = False) -> Path:
    """Write an exported or personalized model in another format.

    Args:
        path: a .safetensors or .npz file.
        out: the folder of the new file.
        to: see ``export_models``; "peft" is for runs.
        imports: whether code that the file names by import path may be imported.
    """
    known = [name for name in FORMATS if name != "peft"]
    if to not in known:
        raise UserError("to", to, f"one of {', '.join(known)}")
    data = FORMATS[to].make(read_portable(path, imports=imports))
    place = out / f"{path.stem}{FORMATS[to].suffix}"
    if place.exists():
        raise RunError(f"{place}: exists already and is not overwritten")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(place, cast(bytes, data))
    return place
