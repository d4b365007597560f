# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters in the files of ``peft``: a configuration, and safetensors by module.

An adapter of fedblend has the factors of all layers of a transformer in one array, by
the path of its weight: A [rank, layers, in], B [layers, out, rank]. A file of ``peft``
has them by the name of the module, ``lora_A`` [rank, in] and ``lora_B`` [out, rank].
GPT-2 has queries, keys and values in one module, ``c_attn``: the change of all three is
a product again, of the rank of all together::

    lora_A = [A_q; A_k; A_v],    lora_B = the blocks B_q, B_k and B_v on a diagonal

Back, each of the three has the whole A and its rows of B.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend.checks import Instance, gate
from fedblend.core import PyTree
from fedblend.data.dataset import require
from fedblend.errors import InputError, UserError
from fedblend.models.adapt.lora import Lora, lora
from fedblend.models.transformer.checkpoint import CONFIG

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FUSED = ("layers/query", "layers/key", "layers/value")
C_ATTN = "transformer.h.{}.attn.c_attn"
LAYOUTS: dict[str, dict[str, str]] = {
    "gpt2": {
        **dict.fromkeys(FUSED, C_ATTN),
        "layers/out": "transformer.h.{}.attn.c_proj",
        "layers/up": "transformer.h.{}.mlp.c_fc",
        "layers/down": "transformer.h.{}.mlp.c_proj",
        "last": "lm_head",
    },
    "llama": {
        "layers/query": "model.layers.{}.self_attn.q_proj",
        "layers/key": "model.layers.{}.self_attn.k_proj",
        "layers/value": "model.layers.{}.self_attn.v_proj",
        "layers/out": "model.layers.{}.self_attn.o_proj",
        "layers/gate": "model.layers.{}.mlp.gate_proj",
        "layers/up": "model.layers.{}.mlp.up_proj",
        "layers/down": "model.layers.{}.mlp.down_proj",
        "last": "lm_head",
    },
    "bert": {
        "layers/query": "bert.encoder.layer.{}.attention.self.query",
        "layers/key": "bert.encoder.layer.{}.attention.self.key",
        "layers/value": "bert.encoder.layer.{}.attention.self.value",
        "layers/out": "bert.encoder.layer.{}.attention.output.dense",
        "layers/up": "bert.encoder.layer.{}.intermediate.dense",
        "layers/down": "bert.encoder.layer.{}.output.dense",
    },
}
"""The modules of the models of ``transformers``, by the paths of products here; "{}"
stands for the number of a layer."""
BERT_HEADS = {
    "BertForMaskedLM": "cls.predictions.transform.dense",
    "BertForSequenceClassification": "bert.pooler.dense",
}
"""The module of BERT before the scores, by the class of a checkpoint."""
TASKS = {"gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM"}


class Factors(NamedTuple):
    """The change of one module: A [rank, in, ...] and B [out, rank]."""

    a: np.ndarray
    b: np.ndarray


@gate(how=Instance(Lora, "fb.lora(...)"))
def export_peft(
    folder: str | Path,
    adapter: PyTree,
    *,
    how: Lora,
    base: str | Path | None = None,
) -> None:
    """Write an adapter as ``peft`` reads it.

    ``peft.PeftModel.from_pretrained(model, folder)`` then computes what the adapted
    model does. A mixture of two adapters, which has the rank of both, is one as well.

    Args:
        folder: made if it is not there.
        adapter: parameters of a model that ``adapt`` made with ``lora``; with
            ``train="b"``, what ``with_frozen`` returns.
        how: that ``lora``: the change is scaled as it says.
        base: the folder of the base that ``load_transformer`` read, whose
            ``config.json`` says which layout its weights have; None for a model of
            ``from_torch``, whose modules have the names that the paths say.

    Raises:
        UserError: some change is none of a module of that layout.
    """
    kind = None if base is None else _base_config(base)["model_type"]
    name = None if base is None else str(base)
    place = Path(folder)
    files = peft_files(adapter, how, _layout(base), kind=kind, base=name)
    place.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (place / file).write_bytes(content)


def peft_files(
    adapter: PyTree,
    how: Lora,
    layout: dict[str, str] | None,
    *,
    kind: str | None = None,
    base: str | None = None,
) -> dict[str, bytes]:
    """The files of an adapter, by name.

    Args:
        adapter: see ``export_peft``.
        how: that ``lora``.
        layout: names of modules, one of ``LAYOUTS``; None if paths say them.
        kind: "gpt2", "llama" or "bert"; None for another module.
        base: what ``peft`` calls the base, a folder or a name; None for nothing.
    """
    library = require("safetensors.numpy", "export_peft", extra="text")
    modules, arrays = dict(_modules(adapter, layout)), {}
    for name, (a, b) in modules.items():
        # The second of two convolutions is one of a single pixel.
        b = b.reshape(*b.shape, *(1,) * (a.ndim - 2))
        for letter, factor in (("A", a), ("B", b)):
            array = np.ascontiguousarray(factor, np.float32)
            arrays[f"{PREFIX}{name}.lora_{letter}.weight"] = array
    ranks = {name: len(one.a) for name, one in modules.items()}
    table = {**_config(ranks, how), "base_model_name_or_path": base}
    table |= {"task_type": TASKS.get(str(kind)), "fan_in_fan_out": kind == "gpt2"}
    text = json.dumps(table, indent=2, sort_keys=True) + "\n"
    weights = library.save(arrays, metadata={"format": "pt"})
    return {ADAPTER_CONFIG: text.encode(), ADAPTER: weights}


def import_peft(
    folder: str | Path, *, base: str | Path | None = None
) -> tuple[PyTree, Lora]:
    """An adapter that ``peft`` wrote, to start from, and the ``lora`` to use it with.

    Weights of ``adapt(..., where=list(adapter))`` are those that it changes. The scale
    of the file is in the factors: the ``lora`` has the scale 1.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        base: as of ``export_peft``.

    Raises:
        InputError: one line on what is missing, damaged or not supported.
    """
    library = require("safetensors.numpy", "import_peft", extra="text")
    place, layout = Path(folder), _layout(base)
    table, arrays = _read(place, library)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        name, _, factor = key.removeprefix(PREFIX).rpartition(".lora_")
        if not key.startswith(PREFIX) or factor not in ("A.weight", "B.weight"):
            raise InputError(f"{place / ADAPTER}: {key!r} is not a factor of a module")
        pairs.setdefault(name, {})[factor[0]] = array
    found: dict[str, dict[int, Factors]] = {}
    for name, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise InputError(f"{place / ADAPTER}: {name} lacks a factor")
        a, b = pair["A"], pair["B"].reshape(pair["B"].shape[:2])
        scale = _of_pattern(table, "alpha", name) / _of_pattern(table, "rank", name)
        for path, layer, rows in _places(place, name, layout):
            part = b if rows is None else np.split(b, len(FUSED))[rows]
            found.setdefault(path, {})[layer] = Factors(a, scale * part)
    return _stacked(place, found), lora(int(table["r"]))


def _layout(base: str | Path | None) -> dict[str, str] | None:
    """The names of modules by path; None if paths say them."""
    if base is None:
        return None
    table = _base_config(base)
    for name in table.get("architectures") or ():
        if name in BERT_HEADS:
            return {**LAYOUTS["bert"], "head/dense": BERT_HEADS[name]}
    return LAYOUTS[table["model_type"]]


def _base_config(base: str | Path) -> dict[str, Any]:
    """The configuration of the base, whose layout is known."""
    file = Path(base) / CONFIG
    try:
        table = json.loads(file.read_text("utf-8"))
        kind = table["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: no configuration of a base: {error}") from None
    if kind not in LAYOUTS:
        allowed = f"one with model_type {', '.join(LAYOUTS)}"
        raise UserError("peft: base", str(base), allowed, f"model_type {kind!r}")
    return table


def _modules(
    adapter: PyTree, layout: dict[str, str] | None
) -> Iterator[tuple[str, Factors]]:
    """The change of every module, by its name."""
    fused: dict[str, Factors] = {}
    for path, change in adapter.items():
        a, b = _factors(path, change)
        if layout is None:
            yield path.removesuffix("weight").rstrip("./"), Factors(a, b)
            continue
        place = path.removesuffix("/weight")
        if place not in layout:
            known = ", ".join(f"{one}/weight" for one in layout)
            raise UserError("export_peft: adapter", path, f"one of {known}")
        if layout[place] == C_ATTN:
            fused[place] = Factors(a, b)
        elif "{}" not in layout[place]:
            yield layout[place], Factors(a, b)
        else:
            for layer in range(len(b)):
                yield layout[place].format(layer), Factors(a[:, layer], b[layer])
    if fused:
        layers, width, _ = next(iter(fused.values())).b.shape
        for layer in range(layers):
            yield C_ATTN.format(layer), _joined(fused, layer, width)


def _factors(path: str, change: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(change, dict) or change.keys() != {"a", "b"}:
        has = ", ".join(change) if isinstance(change, dict) else "one array"
        allowed = "factors a and b; two adapters: mixing.sum_of_changes, only b: "
        allowed += "with_frozen"
        raise UserError("export_peft: adapter", path, allowed, f"{path} with {has}")
    return np.asarray(change["a"]), np.asarray(change["b"])


def _joined(fused: dict[str, Factors], layer: int, width: int) -> Factors:
    """The change of queries, keys and values as one product."""
    ranks = [len(one.a) for one in fused.values()]
    b, column = np.zeros((len(FUSED) * width, sum(ranks)), np.float32), 0
    for (place, one), rank in zip(fused.items(), ranks, strict=True):
        row = FUSED.index(place) * width
        b[row : row + width, column : column + rank] = one.b[layer]
        column += rank
    return Factors(np.concatenate([one.a[:, layer] for one in fused.values()]), b)


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


def _read(place: Path, library: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the arrays of an adapter."""
    try:
        table = json.loads((place / ADAPTER_CONFIG).read_text("utf-8"))
        arrays = library.load_file(place / ADAPTER)
    except Exception as error:  # safetensors has an error of its own
        why = " ".join(str(error).split())
        raise InputError(f"{place}: no adapter of peft: {why}") from None
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


def _of_pattern(table: dict[str, Any], what: str, name: str) -> float:
    """The rank or alpha of a module: by its pattern, else that of all."""
    for pattern, value in (table.get(f"{what}_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return table["r" if what == "rank" else "lora_alpha"]


def _places(
    place: Path, name: str, layout: dict[str, str] | None
) -> list[tuple[str, int, int | None]]:
    """The paths that a module is, its layer, and which third of its rows, if any."""
    if layout is None:
        return [(f"{name}.weight", -1, None)]
    found = []
    for path, module in layout.items():
        match = re.fullmatch(re.escape(module).replace(r"\{\}", r"(\d+)"), name)
        if match:
            layer = int(match[1]) if match.groups() else -1
            third = FUSED.index(path) if module == C_ATTN else None
            found.append((f"{path}/weight", layer, third))
    if not found:
        raise InputError(f"{place / ADAPTER}: {name} is no module of that base")
    return found


def _stacked(place: Path, found: dict[str, dict[int, Factors]]) -> PyTree:
    """The factors of all layers as two arrays."""
    adapter = {}
    for path, by_layer in found.items():
        if -1 in by_layer:
            a, b = by_layer[-1]
        else:
            layers = sorted(by_layer)
            shapes = {one.a.shape for one in by_layer.values()}
            if layers != list(range(len(layers))) or len(shapes) > 1:
                raise InputError(
                    f"{place / ADAPTER}: the layers of {path} have several ranks, or "
                    "some have no change"
                )
            a = np.stack([by_layer[layer].a for layer in layers], axis=1)
            b = np.stack([by_layer[layer].b for layer in layers])
        adapter[path] = {"a": jnp.asarray(a), "b": jnp.asarray(b)}
    return adapter
