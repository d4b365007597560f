# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Trees as bytes and back, for messages and files; nothing is ever unpickled.

The layout is that of safetensors: eight bytes with the length of a JSON header, the
header (name, dtype, shape and place of every leaf, and text of our own under
``__metadata__``), then the raw little-endian data. A leaf's name is its path in the
tree, and a checksum over everything else stands in the metadata.

The models of many clients are one such file, whose leaves are [clients, ...]. It is
written block by block and read client by client through a memory map, so that neither
holds all models in memory; a reader checks the checksum where the file is small.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from fedblend import trees
from fedblend.core import PyTree, Ragged, is_ragged

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_NAMES = {code: name for name, code in _DTYPES.items()}
_MOST_AXES = 64
"""NumPy has no more; a product of many huge numbers would take seconds."""
DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a header can come to when its bytes are arbitrary."""


class WireError(ValueError):
    """Bytes that are not what they should be."""


def name_leaves(tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves by their path."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path) or "value": leaf for path, leaf in paths}


def pack(tree: PyTree, metadata: Mapping[str, str] | None = None) -> bytes:
    """A tree of arrays, and some words about it, as bytes."""
    return pack_named(name_leaves(tree), metadata)


def pack_named(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> bytes:
    """``pack`` of arrays that have their names already."""
    leaves = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    header, words = places_of(leaves), dict(metadata or {})
    chunks = [raw(leaf) for leaf in leaves.values()]
    words["sha256"] = checksum(words, header, chunks)
    return b"".join([header_bytes(words, header), *chunks])


def unpack(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays by name and the metadata; a ``WireError`` if anything is off."""
    header, metadata, body = read_header(memoryview(data))
    with refuse_damage():
        arrays = {name: array_at(body, entry) for name, entry in header.items()}
    check_sum(metadata, header, body)
    return arrays, metadata


@contextlib.contextmanager
def refuse_damage() -> Iterator[None]:
    """Make a ``WireError`` of what reading a damaged header comes to."""
    try:
        yield
    except DAMAGE as error:
        raise WireError(f"header is damaged ({type(error).__name__})") from None


def check_sum(metadata: dict[str, str], header: Mapping, body: memoryview) -> None:
    """Take the checksum out of the metadata; a ``WireError`` if it is not that."""
    if metadata.pop("sha256", None) != checksum(metadata, header, [body]):
        raise WireError("data is damaged: its checksum does not match")


def raw(array: np.ndarray) -> bytes:
    """The data of an array, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def places_of(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Dtype, shape and place in the data of every leaf, one leaf after another.

    Leaves need only ``shape`` and ``dtype``.
    """
    header, place = {}, 0
    for name, leaf in leaves.items():
        dtype = np.dtype(leaf.dtype)
        if dtype.name not in _DTYPES:
            raise WireError(f"{name} is {dtype}, which cannot be sent")
        end = place + dtype.itemsize * math.prod(leaf.shape)
        header[name] = {
            "dtype": _DTYPES[dtype.name],
            "shape": list(leaf.shape),
            "data_offsets": [place, end],
        }
        place = end
    return header


def header_bytes(words: Mapping[str, str], header: Mapping[str, Any]) -> bytes:
    """The beginning of a file: the length of the header, and the header."""
    text = json.dumps({"__metadata__": words, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(
    data: memoryview,
) -> tuple[dict[str, Any], dict[str, str], memoryview]:
    """The entries of all leaves, the metadata with its checksum, and the data."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise WireError(f"not a fedblend file, or cut off after {len(data)} bytes")
    with refuse_damage():
        header = json.loads(bytes(data[8 : 8 + length]).decode())
        metadata = dict(header.pop("__metadata__", {}))
        body = data[8 + length :]
        last = 0
        for begin, end in sorted(entry["data_offsets"] for entry in header.values()):
            if not last == begin <= end:  # every byte belongs to exactly one leaf
                raise ValueError(f"offsets {begin}:{end} overlap or leave a gap")
            last = end
        if last != len(body):
            raise ValueError(f"the data ends at {len(body)}, not at {last}")
    return header, metadata, body


def checksum(words: Mapping, header: Mapping, chunks: Iterable[Any]) -> str:
    """Of the metadata, the header and the data, in this order."""
    found = hashlib.sha256(json.dumps([words, header]).encode())
    for chunk in chunks:
        found.update(chunk)
    return found.hexdigest()


def array_at(body: memoryview, entry: Mapping[str, Any]) -> np.ndarray:
    """The leaf of an entry of the header."""
    begin, end = entry["data_offsets"]
    dtype, shape = jax.numpy.dtype(_NAMES[entry["dtype"]]), entry["shape"]
    if len(shape) > _MOST_AXES:
        raise ValueError(f"a shape of {len(shape)} axes")
    if min(shape, default=0) < 0 or end - begin != dtype.itemsize * math.prod(shape):
        raise ValueError(f"shape {shape} does not fill {end - begin} bytes")
    return np.frombuffer(body[begin:end], dtype).reshape(shape)


def build_tree(arrays: Mapping[str, np.ndarray], template: PyTree) -> PyTree:
    """The arrays in the structure of the template, whose shapes and dtypes they have.

    Leaves of the template need only ``shape`` and ``dtype``.
    """
    wanted = name_leaves(template)
    missing = sorted(set(wanted) - set(arrays))
    foreign = sorted(set(arrays) - set(wanted))
    if missing or foreign:
        name = (missing or foreign)[0]
        what = "is missing" if missing else "is not expected"
        raise WireError(f"{name} {what}: another model, algorithm or version")
    leaves = []
    for name, leaf in wanted.items():
        found = arrays[name]
        if found.shape != tuple(leaf.shape) or found.dtype != leaf.dtype:
            raise WireError(
                f"{name} is {found.dtype}{list(found.shape)}, "
                f"expected {leaf.dtype}{list(leaf.shape)}"
            )
        leaves.append(found)
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def traveling(message: PyTree) -> PyTree:
    """What of a message really travels, in the structure of the message.

    Of a ``Ragged`` leaf the entries in use, and nothing of what both sides know.
    """

    def cut(leaf):
        if isinstance(leaf, Ragged):
            return np.asarray(leaf.buffer)[: int(leaf.used)]
        return leaf

    return jax.tree.map(cut, message, is_leaf=is_ragged)


def complete_message(arrays: Mapping[str, np.ndarray], template: PyTree) -> PyTree:
    """The message of which these leaves travelled; the inverse of ``traveling``.

    Leaves of the template need only ``shape`` and ``dtype``.
    """

    def shape_to_read(path, leaf):
        if not isinstance(leaf, Ragged):
            return leaf
        found = arrays.get(jax.tree_util.keystr(path) or "value")
        length = len(found) if found is not None and found.ndim else 0
        shape = (min(length, leaf.buffer.shape[0]), *leaf.buffer.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.buffer.dtype)

    cut = jax.tree_util.tree_map_with_path(shape_to_read, template, is_leaf=is_ragged)
    leaves = iter(jax.tree.leaves(build_tree(arrays, cut)))

    def whole(leaf):
        sent = next(leaves)
        if not isinstance(leaf, Ragged):
            return sent
        buffer = np.zeros(leaf.buffer.shape, leaf.buffer.dtype)
        buffer[: len(sent)] = sent
        used = np.asarray(len(sent), leaf.used.dtype)
        return Ragged(jax.device_put(buffer), jax.device_put(used))

    return jax.tree.map(whole, template, is_leaf=is_ragged)


def write_atomically(path: Path, data: bytes) -> None:
    """Put a whole file in its place, or leave the old one."""
    with replace_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its place when it is whole."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "w+b", opener=not_through_links) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        # Half a file would keep a full disk full.
        beside.unlink(missing_ok=True)
    sync(path.parent)


def not_through_links(path: str, flags: int) -> int:
    """Open a file to write; a link that came with somebody's folder is refused."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def sync(folder: Path) -> None:
    """Have on disk what was moved in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


CHECKED_BYTES = 2**26
"""Files up to this size are checked as a whole when they are opened."""
CHUNK = 2**20
"""Bytes of the data that are read at once for the checksum."""
UNKNOWN = "0" * 64
"""Takes the place of the checksum until all data is written."""


@contextlib.contextmanager
def stack_writer(
    path: Path, template: PyTree, clients: int, metadata: Mapping[str, str]
) -> Iterator[Callable[[PyTree], None]]:
    """Write models one after another; the file is whole at its place, or absent.

    Args:
        path: of the file.
        template: one client's model, or its shapes and dtypes.
        clients: how many models there will be.
        metadata: words about them.

    Yields:
        A function that writes the models of the next clients, stacked: leaves
        [clients, ...].
    """
    stacked = name_leaves(trees.shapes(template, clients))
    header, words, written = places_of(stacked), dict(metadata), 0
    start = len(header_bytes({**words, "sha256": UNKNOWN}, header))
    with replace_file(path) as file:

        def add(models: PyTree) -> None:
            nonlocal written
            leaves = {
                name: np.asarray(one) for name, one in name_leaves(models).items()
            }
            for name, leaf in leaves.items():
                begin, _ = header[name]["data_offsets"]
                file.seek(start + begin + written * (leaf.nbytes // len(leaf)))
                file.write(raw(leaf))
            written += len(next(iter(leaves.values())))

        yield add
        if written != clients:
            raise ValueError(f"{written} of {clients} models are written")
        file.seek(start)
        chunks = iter(lambda: file.read(CHUNK), b"")
        words["sha256"] = checksum(words, header, chunks)
        file.seek(0)
        file.write(header_bytes(words, header))


class StackReader:
    """The models of a file, one by one; ``metadata`` are the words about them.

    Raises:
        WireError: the file is damaged.
    """

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise WireError("not a fedblend file: it is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._header, self.metadata, self._body = read_header(memoryview(mapped))
        if size <= CHECKED_BYTES:
            check_sum(self.metadata, self._header, self._body)
        self.metadata.pop("sha256", None)
        with refuse_damage():
            (self.clients,) = {entry["shape"][0] for entry in self._header.values()}

    def model(self, client: int) -> dict[str, np.ndarray]:
        """The leaves of one client's model, by name."""
        with refuse_damage():
            return {
                name: np.array(array_at(self._body, entry)[client])
                for name, entry in self._header.items()
            }
