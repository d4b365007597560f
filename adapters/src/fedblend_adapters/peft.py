# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters in the files of ``peft``: a configuration, and safetensors by module.

The names of parameters of a model of ``from_torch`` are those of its modules, so that
the change of ``model.layers.0.self_attn.q_proj.weight`` is what ``peft`` calls by this
name: ``lora_A`` [rank, in] and ``lora_B`` [out, rank].
"""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedblend.checks import Instance, gate
from fedblend.core import PyTree
from fedblend.errors import InputError, UserError
from fedblend_adapters.kinds import Lora, lora

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


@gate(how=Instance(Lora, "fb.adapt.lora(...)"))
def export_peft(folder: str | Path, adapter: PyTree, *, how: Lora) -> None:
    """Write an adapter of a model of ``from_torch`` as ``peft`` reads it.

    ``peft.PeftModel.from_pretrained(module, folder)`` then computes what the adapted
    model does. A mixture of two adapters, which has the rank of both, is one as well.

    Args:
        folder: made if it is not there.
        adapter: parameters of a model that ``adapt`` made with ``lora``; with
            ``train="b"``, what ``add_frozen`` returns.
        how: that ``lora``: the change is scaled as it says.

    Raises:
        UserError: some change has no factors A and B.
    """
    place = Path(folder)
    files = peft_files(adapter, how)
    place.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (place / file).write_bytes(content)


def peft_files(
    adapter: PyTree, how: Lora, *, base: str | None = None
) -> dict[str, bytes]:
    """The files of an adapter by name, that of the weights first.

    Args:
        adapter: see ``export_peft``.
        how: that ``lora``.
        base: what ``peft`` calls the base, a folder or a name; None for nothing.
    """
    from safetensors.numpy import save

    ranks, arrays = {}, {}
    for path, change in adapter.items():
        name = path.removesuffix("weight").rstrip("./")
        a, b = _factors(path, change)
        ranks[name] = len(a)
        # The second of two convolutions is one of a single pixel.
        b = b.reshape(*b.shape, *(1,) * (a.ndim - 2))
        for letter, factor in (("A", a), ("B", b)):
            array = np.ascontiguousarray(factor, np.float32)
            arrays[f"{PREFIX}{name}.lora_{letter}.weight"] = array
    table = {**_config(ranks, how), "base_model_name_or_path": base}
    text = json.dumps(table, indent=2, sort_keys=True) + "\n"
    weights = save(arrays, metadata={"format": "pt"})
    return {ADAPTER: weights, ADAPTER_CONFIG: text.encode()}


def import_peft(folder: str | Path) -> tuple[PyTree, Lora]:
    """An adapter that ``peft`` wrote, to start from, and the ``lora`` to use it with.

    Weights of ``adapt(..., where=list(adapter))`` are those that it changes. The scale
    of the file is in the factors: the ``lora`` has the scale 1.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        InputError: one line on what is missing, damaged or not supported.
    """
    place = Path(folder)
    table, arrays = _read(place)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        name, _, factor = key.removeprefix(PREFIX).rpartition(".lora_")
        if not key.startswith(PREFIX) or factor not in ("A.weight", "B.weight"):
            raise InputError(f"{place / ADAPTER}: {key!r} is not a factor of a module")
        pairs.setdefault(name, {})[factor[0]] = array
    adapter = {}
    for name, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise InputError(f"{place / ADAPTER}: {name} lacks a factor")
        scale = _match_pattern(table, "alpha", name) / _match_pattern(
            table, "rank", name
        )
        b = scale * pair["B"].reshape(pair["B"].shape[:2])
        adapter[f"{name}.weight"] = {"a": jnp.asarray(pair["A"]), "b": jnp.asarray(b)}
    return adapter, lora(int(table["r"]))


def _factors(path: str, change: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(change, dict) or change.keys() != {"a", "b"}:
        has = ", ".join(change) if isinstance(change, dict) else "one array"
        allowed = "factors a and b; two adapters: mixing.sum_of_changes, only b: "
        allowed += "add_frozen"
        raise UserError("export_peft: adapter", path, allowed, f"{path} with {has}")
    return np.asarray(change["a"]), np.asarray(change["b"])


def _config(ranks: dict[str, int], how: Lora) -> dict[str, Any]:
    """What ``peft`` needs to know: ranks and scales, of modules by their full names."""
    usual = min(ranks.values())
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA",
        "r": usual,
        "lora_alpha": how.scale * usual,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {name: how.scale * rank for name, rank in others.items()},
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _read(place: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the arrays of an adapter."""
    from safetensors.numpy import load_file

    try:
        table = json.loads((place / ADAPTER_CONFIG).read_text("utf-8"))
        arrays = load_file(place / ADAPTER)
    except Exception as error:  # safetensors has an error of its own
        why = " ".join(str(error).split())
        raise InputError(f"{place}: not an adapter of PEFT: {why}") from None
    for key, allowed in (
        ("peft_type", "LORA"),
        ("bias", "none"),
        ("use_dora", False),
        ("use_rslora", False),
        ("modules_to_save", None),
        ("layer_replication", None),
    ):
        if (table.get(key) or allowed) != allowed:
            raise InputError(
                f"{place / ADAPTER_CONFIG}: {key} = {table[key]!r} is not supported, "
                f"only {allowed!r}"
            )
    return table, arrays


def _match_pattern(table: dict[str, Any], what: str, name: str) -> float:
    """The rank or alpha of a module: by its pattern, else that of all."""
    for pattern, value in (table.get(f"{what}_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return table["r" if what == "rank" else "lora_alpha"]
