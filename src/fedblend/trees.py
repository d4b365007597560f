# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on trees of arrays, in short verbs, and its precision."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree


def add(left: PyTree, right: PyTree) -> PyTree:
    """``left + right``, leaf by leaf."""
    return jax.tree.map(jnp.add, left, right)


def subtract(left: PyTree, right: PyTree) -> PyTree:
    """``left - right``, leaf by leaf."""
    return jax.tree.map(jnp.subtract, left, right)


def scale(factor, tree: PyTree) -> PyTree:
    """``factor * tree``, in the dtype of each leaf."""
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, tree)


def strongly_typed(tree: PyTree) -> PyTree:
    """The same arrays without weak types, which would cost a second trace."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)


def zeros_like(tree: PyTree) -> PyTree:
    """A tree of zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


IsLeaf = Callable[[Any], bool]
"""Whether a node of a tree counts as a leaf."""


def _name(path: Any) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/")  # the value of a statistic has no name of its own


def map_with_path(
    function: Callable[..., Any],
    tree: PyTree,
    *rest: PyTree,
    is_leaf: IsLeaf | None = None,
) -> PyTree:
    """``function(path, leaf, ...)`` for every leaf, its path as in "last/weight"."""

    def call(path, *leaves):
        return function(_name(path), *leaves)

    return jax.tree_util.tree_map_with_path(call, tree, *rest, is_leaf=is_leaf)


_map_with_none = partial(jax.tree.map, is_leaf=lambda node: node is None)


def leaves_by_path(tree: PyTree, is_leaf: IsLeaf | None = None) -> dict[str, Any]:
    """The leaves of a tree by their path, such as "last/weight", in their order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    return {_name(path): leaf for path, leaf in leaves}


def add_where_given(tree: PyTree, addend: PyTree | None) -> PyTree:
    """``tree + addend``, where None in ``addend`` stands for any subtree of zeros."""
    return _map_with_none(
        lambda more, here: here if more is None else add(here, more), addend, tree
    )


def where_given(pattern: PyTree, tree: PyTree) -> PyTree:
    """``tree`` where ``pattern`` has something, and None where it has None."""
    return _map_with_none(
        lambda given, here: None if given is None else here, pattern, tree
    )


def fill(tree: PyTree, other: PyTree) -> PyTree:
    """``tree`` with the leaves of ``other`` where it has None."""
    return _map_with_none(
        lambda here, more: more if here is None else here, tree, other
    )


def select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """``yes`` where the condition holds, else ``no``; leading axes are matched."""

    def choose(left, right):
        spread = condition.reshape(
            condition.shape + (1,) * (left.ndim - condition.ndim)
        )
        return jnp.where(spread, left, right)

    return jax.tree.map(choose, yes, no)


def sum_squares(tree: PyTree) -> jax.Array:
    """The sum of all squared entries."""
    return sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)), start=0.0)  # pyright: ignore


def norm(tree: PyTree) -> jax.Array:
    """The length of the tree as one vector."""
    return jnp.sqrt(sum_squares(tree))


def largest(tree: PyTree) -> jax.Array:
    """The largest absolute entry, 0 where there is none; float32."""
    sizes = [jnp.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(tree)]
    return jnp.stack([jnp.zeros(()), *sizes]).max().astype(jnp.float32)


def is_finite(tree: PyTree) -> jax.Array:
    """Whether every entry of every floating leaf is finite."""
    checks = [
        jnp.isfinite(leaf).all()
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return jnp.stack(checks).all() if checks else jnp.ones((), bool)


def shapes(tree: PyTree, *ahead: int) -> PyTree:
    """Shapes and dtypes of all leaves, with more axes ahead."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*ahead, *leaf.shape), leaf.dtype), tree
    )


def take(tree: PyTree, index) -> PyTree:
    """Rows ``index`` of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def concatenate(parts: Sequence[PyTree], axis: int = 0) -> PyTree:
    """Trees of the same structure one after another; NumPy's arrays if several."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis), *parts)


def stack(parts: Sequence[PyTree]) -> PyTree:
    """Trees of the same structure along a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def put(tree: PyTree, row: PyTree, *place: jax.Array) -> PyTree:
    """Every leaf with this row at one place of its first axes, which must be there."""

    def write(leaf, new):
        row = new.reshape(*[1] * len(place), *new.shape)
        index = [jnp.asarray(one, jnp.int32) for one in (*place, *[0] * new.ndim)]
        return jax.lax.dynamic_update_slice(leaf, row, index)

    return jax.tree.map(write, tree, row)


def flat(tree: PyTree, axes: int) -> PyTree:
    """Every leaf with its first ``axes`` axes as one."""

    def merge(leaf):
        return leaf.reshape(math.prod(leaf.shape[:axes]), *leaf.shape[axes:])

    return jax.tree.map(merge, tree)


def size(tree: PyTree) -> int:
    """The number of entries of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


class Layout(NamedTuple):
    """The structure, shapes and dtypes of a tree; static, and hashable."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @property
    def size(self) -> int:
        """The number of entries of all leaves."""
        return sum(math.prod(shape) for shape in self.shapes)


def ravel(tree: PyTree) -> tuple[jax.Array, Layout]:
    """All entries as one vector, and how to put them back."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = tuple(leaf.shape for leaf in leaves)
    dtypes = tuple(jnp.dtype(leaf.dtype) for leaf in leaves)
    common = jnp.result_type(*dtypes) if dtypes else jnp.float32
    parts = [leaf.reshape(-1).astype(common) for leaf in leaves]
    vector = jnp.concatenate(parts) if parts else jnp.zeros((0,), common)
    return vector, Layout(structure, shapes, dtypes)


def unravel(vector: jax.Array, layout: Layout) -> PyTree:
    """The tree that ``ravel`` took apart."""
    leaves, place = [], 0
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        size = math.prod(shape)
        leaves.append(vector[place : place + size].reshape(shape).astype(dtype))
        place += size
    return jax.tree.unflatten(layout.structure, leaves)


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """Compute with "float32" or "float64" inside of a ``with`` block."""
    before = jax.config.jax_enable_x64  # pyright: ignore
    jax.config.update("jax_enable_x64", name == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
