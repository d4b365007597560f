# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients' rows in Python objects: arrays, datasets of other libraries, folders.

Clients are a list or a mapping of ``(inputs, labels)``, of a ``Dataset`` or
``DataLoader`` of PyTorch, or of a ``Dataset`` of Hugging Face; a partitioner of Flower
Datasets; one Hugging Face ``Dataset`` with a column of clients; or a folder of images,
``root/client/class/image.png``. Objects are known by their methods, and nothing here
imports their libraries.

Integer labels among which is 0 are class numbers and stay as they are. Other integers
and texts are numbered in their order, with their names. Floats are numbers, except for
0.0 and 1.0 or -1.0 and 1.0 alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedblend.data.dataset import (
    DataError,
    Dataset,
    Rows,
    check_rows,
    group_rows,
    intact,
)
from fedblend.data.readers.arrays import Raw
from fedblend.data.readers.tables import check_names
from fedblend.data.readers.targets import make_dataset
from fedblend.errors import UserError
from fedblend.extras import require

CLIENT = (
    "(inputs, labels), nor a Dataset or DataLoader with such rows; flat arrays need a "
    "partition"
)
CLIENTS = (
    "a list or mapping of clients, a partitioner, a Dataset with client=, or a folder "
    "of images; flat arrays need a partition"
)
Kind = Literal["classes", "regression"]
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


class Columns(NamedTuple):
    """The names in a ``Dataset`` with columns; inputs are all others if None."""

    client: str | None = None
    target: str = "label"
    inputs: str | Sequence[str] | None = None


class _Rows(NamedTuple):
    """Rows, where they come from for errors, and the names of their classes."""

    where: str
    inputs: np.ndarray
    labels: np.ndarray
    label_names: tuple[str, ...] = ()


class Clients(NamedTuple):
    """All rows, those of each client, its name, and the names of the classes."""

    rows: Rows
    partition: list[np.ndarray]
    names: tuple[str, ...]
    label_names: tuple[str, ...]


def is_dataset(source: Any) -> bool:
    """Whether this is an object with rows, and no tree of arrays."""
    plain = isinstance(source, Mapping | tuple | list) or hasattr(source, "__array__")
    return not plain and (hasattr(source, "__getitem__") or hasattr(source, "__iter__"))


def read_clients(source: Any, columns: Columns, kind: Kind | None) -> Clients:
    """All clients that an object holds; see above.

    Args:
        source: what holds them.
        columns: the names of columns, where it has some.
        kind: what labels are; what they look like if None.
    """
    if kind not in (None, "classes", "regression"):
        raise UserError("federate: kind", kind, "'classes' or 'regression'")
    if isinstance(source, str | Path):
        one, owner = _read_folder(Path(source))
        names, parts = (), [one]
    elif _has_columns(source):
        client, where = str(columns.client), "federate: client"
        check_names([client], source.column_names, "column", where)
        owner = _read_column(source, client, where)
        if owner.dtype.kind == "f":
            allowed = "a column with an integer or a text in every row"
            raise UserError(where, client, allowed)
        names, parts = (), [_read(source, columns, "federate")]
    else:
        names, every = zip(*_list(source), strict=True)
        where = "federate: client "
        parts = [
            _read(one, columns, f"{where}{str(name)!r}")
            for name, one in zip(names, every, strict=True)
        ]
        owner = None
        empty = [one.where.removeprefix(where) for one in parts if not one.inputs.size]
        if empty:
            raise DataError(f"federate: no rows of the clients {', '.join(empty)}")
    for one in parts:
        _check(one, parts[0], kind)
    rows = (
        np.concatenate([one.inputs for one in parts]),
        np.concatenate([one.labels for one in parts]),
    )
    if owner is None:
        owner = np.repeat(np.arange(len(parts)), [len(one.inputs) for one in parts])
    else:
        names, owner = np.unique(owner, return_inverse=True)
    labels, label_names = _number(rows, kind)
    return Clients(
        (rows[0], labels),
        group_rows(owner, len(names)),
        tuple(map(str, names)),
        label_names or parts[0].label_names,
    )


def _list(source: Any) -> list[tuple[Any, Any]]:
    """The name and the data of each client."""
    named = []
    if hasattr(source, "num_partitions"):
        parts = [source.load_partition(n) for n in range(source.num_partitions)]
        names = getattr(source, "partition_id_to_natural_id", {})
        named = [(names.get(n, n), part) for n, part in enumerate(parts)]
    elif isinstance(source, list | tuple):
        named = list(enumerate(source))
    elif isinstance(source, Mapping) and not hasattr(source, "column_names"):
        named = list(source.items())
    if not named:
        raise UserError("federate: rows", source, CLIENTS)
    return named


def _has_columns(source: Any) -> bool:
    """Whether this is a ``Dataset`` of Hugging Face, whose rows nothing changes."""
    if isinstance(source, Mapping) or not hasattr(source, "column_names"):
        return False
    return source.format["type"] != "custom"


def _read(source: Any, columns: Columns, where: str) -> _Rows:
    """The rows of one client."""
    if _has_columns(source):
        return _read_columns(source, columns, where)
    pair = getattr(source, "tensors", source)
    if isinstance(pair, tuple | list) and len(pair) == 2:
        inputs, labels = pair
        return _Rows(
            where,
            read_array(inputs, f"{where}: inputs"),
            read_array(labels, f"{where}: labels"),
        )
    if isinstance(source, str) or not is_dataset(source):
        raise UserError(where, source, CLIENT)
    batches = getattr(source, "batch_sampler", None) is not None
    counted = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    items = map(source.__getitem__, range(len(source))) if counted else source
    found: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for item in items:
        if isinstance(item, Mapping):
            target, inputs = _choose(list(item), columns, where)
            item = [*(item[name] for name in inputs), item[target]]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(where, item, "a pair of inputs and label")
        for rows, value in zip(found, item, strict=True):
            array = read_array(value, where)
            rows.extend(array if batches else [array])
    inputs, labels = (_stack(rows, where) for rows in found)
    return _Rows(where, inputs, labels)


def _read_columns(source: Any, columns: Columns, where: str) -> _Rows:
    target, inputs = _choose(source.column_names, columns, where)
    arrays = [_read_column(source, name, where) for name in inputs]
    alone = len(arrays) == 1 and arrays[0].ndim > 1
    return _Rows(
        where,
        arrays[0] if alone else np.moveaxis(_stack(arrays, where), 0, 1),
        _read_column(source, target, where),
        tuple(getattr(source.features[target], "names", ())),
    )


def _choose(
    names: Sequence[str], columns: Columns, where: str
) -> tuple[str, Sequence[str]]:
    """The columns of the target and of the inputs."""
    _, target, inputs = columns
    check_names([target], names, "column", f"{where}: target")
    if inputs is None:
        inputs = [name for name in names if name not in (target, columns.client)]
    inputs = [inputs] if isinstance(inputs, str) else inputs
    check_names(inputs or [""], names, "column", f"{where}: inputs")
    return target, inputs


def _read_column(source: Any, name: str, where: str) -> np.ndarray:
    is_image = type(source.features[name]).__name__ == "Image"
    rows = source.with_format(None if is_image else "numpy")[name][:]
    return read_array(rows, f"{where}: column {name!r}")


def _read_folder(root: Path) -> tuple[_Rows, np.ndarray]:
    """Images in ``root/client/class/`` with their classes, and their clients."""
    paths = sorted(root.glob("*/*/*"))
    found = [path for path in paths if path.suffix.lower() in IMAGES]
    if not found:
        raise DataError(
            f"federate: {root}: has no images client/class/image.png; fb.data.read "
            "reads tables and .npz files"
        )
    pillow = require("PIL.Image", "a folder of images", "pillow")
    images = []
    for path in found:
        with intact(path, "is damaged, or no image"), pillow.open(path) as image:
            images.append(_pixels(image, str(path)))
    pixels = _stack(images, "federate", found)
    classes, clients = (
        np.array([path.parts[place] for path in found]) for place in (-2, -3)
    )
    return _Rows("federate", pixels, classes), clients


def read_array(value: Any, where: str) -> np.ndarray:
    """Numbers or texts of arrays, tensors, images, and lists of these."""
    if hasattr(value, "getbands"):
        return _pixels(value, where)
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()
    if isinstance(value, list | tuple) and value and not np.isscalar(value[0]):
        return _stack([read_array(one, where) for one in value], where)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        array = np.empty(0, object)
    if array.dtype.kind not in "biufU":
        raise UserError(where, value, "made of numbers, images, or texts as labels")
    return array


def _stack(
    arrays: Sequence[np.ndarray], where: str, names: Sequence[Any] = ()
) -> np.ndarray:
    """Arrays of one shape as one array."""
    for number, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            odd, first = (names[n] if names else f"row {n}" for n in (number, 0))
            raise DataError(
                f"{where}: {odd} is of shape {array.shape}, and {first} of "
                f"{arrays[0].shape}; all need one shape"
            )
    return np.array(arrays)


def _pixels(image: Any, where: str) -> np.ndarray:
    """An image as float32 in [0, 1], [height, width, channels]."""
    if image.mode[0] in "IF":
        raise UserError(where, image.mode, "an image of 8 bits, gray or in color")
    gray = image.mode in ("1", "L", "LA")
    pixels = np.asarray(image.convert("L" if gray else "RGB"), np.float32) / 255
    return pixels[..., None] if gray else pixels


def _check(rows: _Rows, first: _Rows, kind: Kind | None) -> None:
    """Refuse rows that do not fit each other, or those of the first client."""
    where, inputs, labels, _ = rows
    if not inputs.ndim or not labels.ndim or inputs.dtype.kind == "U":
        raise UserError(f"{where}: inputs", inputs, "made of numbers, an entry a row")
    check_rows(
        Dataset((inputs, labels), "regression", 1), (inputs, labels), None, where
    )
    negative = labels.dtype.kind == "i" and labels.min() < 0 and labels.ndim == 1
    if kind is None and negative and (np.abs(labels) != 1).any():
        allowed = 'a class number, from 0; kind="regression" takes numbers'
        raise UserError(f"{where}: label", labels.min(), allowed)
    mine, wanted = (
        (one.inputs.shape[1:], one.labels.shape[1:], one.labels.dtype.kind == "U")
        for one in (rows, first)
    )
    if mine != wanted:
        raise DataError(
            f"{where}: shapes of inputs and label, and whether this is a text, are "
            f"{mine}, and those of the first client are {wanted}"
        )


def _number(rows: Rows, kind: Kind | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as class numbers with names, or numbers as they are."""
    inputs, labels = rows
    if labels.shape[1:] == (1,) and (labels.dtype.kind != "f" or kind == "classes"):
        labels = labels[:, 0]
    whole = labels.dtype.kind in "biu"
    if kind is None and whole and (labels.ndim > 1 or labels.min() == 0):
        return labels.astype(np.int32), ()
    made = make_dataset(Raw(inputs, labels, None), kind, "federate", "")
    return made.rows[1], made.label_names
