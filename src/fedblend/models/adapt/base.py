# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The frozen base of a model with adapters: its precision, and what identifies it."""

import hashlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree
from fedblend.models.adapt.uses import leaves_by_path

BaseDtype = Literal["float32", "float16", "bfloat16", "int8"]
"""How a base is kept; None keeps it as it is given."""
LARGEST = 127
"""Whole numbers of 8 bits go so far, to both sides."""


class Quantized(NamedTuple):
    """A weight as whole numbers of 8 bits, and the step of each row."""

    entries: jax.Array
    steps: jax.Array
    """Of the shape of the weight without its last axis."""


def quantize(weight: jax.Array) -> Quantized:
    """The nearest multiples of a step; each row of the last axis has its own.

    Example:
        >>> found = quantize(jnp.array([[0.5, 1.27], [0.0, 0.0]]))
        >>> found.entries.tolist(), round(float(found.steps[0]), 4)
        ([[50, 127], [0, 0]], 0.01)
    """
    largest = jnp.abs(weight).max(axis=-1)
    steps = jnp.where(largest > 0, largest / LARGEST, 1).astype(weight.dtype)
    entries = jnp.round(weight / steps[..., None]).astype(jnp.int8)
    return Quantized(entries, steps)


class Base(NamedTuple):
    """The parameters of a base as they are kept, by path, and as they are used."""

    leaves: dict[str, jax.Array | Quantized]
    shapes: PyTree


def freeze(params: PyTree, dtype: BaseDtype | None) -> Base:
    """The base in this precision.

    Args:
        params: of the model.
        dtype: the model computes in it; "int8" keeps weights of two axes or more in 8
            bits, and computes in the precision that they have.
    """

    def kept(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if dtype == "int8":
            return quantize(leaf) if leaf.ndim > 1 else leaf
        return leaf.astype(dtype)

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        used = leaf.steps.dtype if isinstance(leaf, Quantized) else leaf.dtype
        whole = leaf.entries if isinstance(leaf, Quantized) else leaf
        return jax.ShapeDtypeStruct(whole.shape, used)

    leaves = {path: kept(leaf) for path, leaf in leaves_by_path(params).items()}
    structure = jax.tree.structure(params)
    return Base(leaves, structure.unflatten(map(shape, leaves.values())))


def base_hash(params: PyTree) -> str:
    """The sha256 of parameters: their paths, shapes, dtypes and entries.

    Example:
        >>> base_hash({"weight": jnp.ones(2)})[:16]
        '1b69433a8d52071c'
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(leaves_by_path(params).items()):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
