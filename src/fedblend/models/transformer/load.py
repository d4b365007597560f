# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Public weights as a model and its parameters; and transformers of one's own in files.

A folder has ``config.json`` and ``model.safetensors``, or several files with an index,
as ``transformers`` saves and hubs publish them. The layout is the configuration's
``model_type``: "gpt2", "llama" or "bert"; or "fedblend", whose names are paths of
parameters, such as ``layers/query/weight``.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.data.dataset import require
from fedblend.errors import InputError, UserError, hint
from fedblend.models.model import Model
from fedblend.models.transformer import bert, gpt2, llama
from fedblend.models.transformer.architecture import Architecture
from fedblend.models.transformer.checkpoint import CONFIG, WEIGHTS, Checkpoint
from fedblend.models.transformer.model import build_transformer
from fedblend.models.transformer.parameters import Transformer, start

OWN = "fedblend"
DECODERS = {"gpt2": gpt2, "llama": llama}
LAYOUTS = (*DECODERS, "bert", OWN)


def load_transformer(
    folder: str | Path,
    *,
    classes: int | None = None,
    dtype: Any = None,
    remat: bool = False,
    unroll: bool = False,
) -> tuple[Model, Transformer]:
    """The model of a folder, and its weights.

    ``model.init`` draws new weights of the same shapes; the published ones are the
    second value.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.
        classes: of a new classifier on an encoder (BERT); None for the file's head.
        dtype: of the parameters; None for that of the file.
        remat: compute the inside of layers again for the gradient; saves memory.
        unroll: compile every layer by itself; faster on a GPU.

    Raises:
        InputError: one line on what is missing, damaged or not supported. Pickled
            weights are never read.
    """
    files = Checkpoint(folder)
    kind = files.setting("model_type")
    if kind not in LAYOUTS:
        files.refuse(f"{CONFIG}: model_type = {kind!r}; {hint(str(kind), LAYOUTS)}")
    if classes is not None and kind != "bert":
        raise UserError("load_transformer: classes", classes, f"for {kind}, but BERT")
    try:
        form, params = _read(files, kind, classes)
    except UserError as error:
        files.refuse(f"{CONFIG}: {error}")
    form = dataclasses.replace(form, remat=remat, unroll=unroll)
    dtype = jnp.dtype(params.embedding.tokens.dtype if dtype is None else dtype)
    wanted = jax.eval_shape(lambda key: start(form, key, dtype), jax.random.key(0))
    _require_shapes(files, wanted, params)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    return build_transformer(form, dtype=dtype), params


def save_transformer(
    folder: str | Path, form: Architecture, params: Transformer
) -> None:
    """Write a transformer as files that ``load_transformer`` reads.

    Args:
        folder: made if it is not there.
        form: its sizes and kinds.
        params: its weights.
    """
    library = require("safetensors.numpy", "save_transformer", extra="text")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    arrays = {path: np.ascontiguousarray(leaf) for path, leaf in _by_path(params)}
    library.save_file(arrays, place / WEIGHTS)
    table = {"model_type": OWN, **form.as_table()}
    (place / CONFIG).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _read(
    files: Checkpoint, kind: str, classes: int | None
) -> tuple[Architecture, Transformer]:
    if kind == OWN:
        return _own(files)
    if kind == "bert":
        form = bert.architecture(files, classes)
        return form, bert.parameters(files, form)
    layout = DECODERS[kind]
    form = layout.architecture(files)
    return form, layout.parameters(files, form)


def _own(files: Checkpoint) -> tuple[Architecture, Transformer]:
    known = {field.name for field in dataclasses.fields(Architecture)}
    table = {key: value for key, value in files.config.items() if key != "model_type"}
    for key in table:
        if key not in known:
            files.refuse(f"{CONFIG}: {key!r} is unknown; {hint(key, known)}")
    files.setting("vocabulary")
    form = Architecture(**table)
    shapes = jax.eval_shape(
        lambda key: start(form, key, jnp.float32), jax.random.key(0)
    )
    leaves = [files.take(path) for path, _ in _by_path(shapes)]
    files.all_taken()
    return form, jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _by_path(tree: Transformer) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _require_shapes(files: Checkpoint, wanted: Transformer, found: Transformer) -> None:
    """Refuse weights that do not have the shapes of the configuration."""
    if jax.tree.structure(wanted) != jax.tree.structure(found):
        raise InputError(f"{files.folder}: the weights are not those of {CONFIG}")
    pairs = zip(_by_path(wanted), jax.tree.leaves(found), strict=True)
    for (path, shape), leaf in pairs:
        if leaf.shape != shape.shape:
            files.refuse(
                f"the weights of {path} are {list(leaf.shape)}, and {CONFIG} asks for "
                f"{list(shape.shape)}"
            )
