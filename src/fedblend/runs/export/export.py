# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Writing the models of a run as files, each with a model card beside it."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from fedblend.errors import RunError, UserError
from fedblend.extras import require
from fedblend.runs.export.portable import (
    Portable,
    read_portable,
    safetensors_bytes,
)
from fedblend.runs.model_card import model_card
from fedblend.runs.run_folder import file_words, write_text
from fedblend.runs.saved_run import SavedRun
from fedblend.simulation.serialize import pack_named, write_atomically


def _onnx(portable: Portable) -> bytes:
    interop = require("fedblend_interop.onnx_file", "export: onnx", extra="onnx")
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
    interop = require("fedblend_interop.torch_names", "export: torch", extra="torch")
    facts, task = {**portable.facts, "format": "pt"}, portable.task
    if (task.center, task.scale) != (0, 1):
        facts |= {"center": str(task.center), "scale": str(task.scale)}
    if task.exp_shift is not None:
        facts["log_shift"] = str(task.exp_shift)
    return pack_named(interop.state_dict(portable.params), facts)


def _peft(portable: Portable) -> dict[str, bytes]:
    adapters = require("fedblend_adapters.configured", "export: peft", extra="adapters")
    return adapters.export_files(portable)


class Target(NamedTuple):
    """A format: how a file ends, and how it is made."""

    suffix: str
    make: Callable[[Portable], bytes | dict[str, bytes]]
    """The file; or several by name, which a folder has, that of the weights first."""


FORMATS = {
    "safetensors": Target(".safetensors", safetensors_bytes),
    "onnx": Target(".onnx", _onnx),
    "torch": Target(".torch.safetensors", _torch),
    "peft": Target(".peft", _peft),
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
        to: "safetensors", "onnx", "torch" or, for adapters, "peft".
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
            weights = next(iter(data.values()))
        digest = hashlib.sha256(weights).hexdigest()
        seed_used = int(portable.facts["seed"])
        card = model_card(run, client, seed_used, path.name, digest)
        write_text(path.with_name(f"{path.name}.md"), card)
        paths.append(path)
    return paths


def export_file(path: Path, out: Path, to: str, *, imports: bool = False) -> Path:
    """Write an exported or personalized model in another format.

    Args:
        path: a .safetensors file.
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
