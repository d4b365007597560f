# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on trees of arrays, in short verbs."""

import jax
import jax.numpy as jnp

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


def zeros_like(tree: PyTree) -> PyTree:
    """A tree of zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def add_where_given(tree: PyTree, addend: PyTree | None) -> PyTree:
    """``tree + addend``, where None in ``addend`` stands for any subtree of zeros."""
    return jax.tree.map(
        lambda more, here: here if more is None else add(here, more),
        addend,
        tree,
        is_leaf=lambda node: node is None,
    )


def select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """``yes`` where the condition holds, else ``no``; leading axes are matched."""

    def choose(left, right):
        spread = condition.reshape(
            condition.shape + (1,) * (left.ndim - condition.ndim)
        )
        return jnp.where(spread, left, right)

    return jax.tree.map(choose, yes, no)


def squared_norm(tree: PyTree) -> jax.Array:
    """The sum of all squared entries."""
    return sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)), start=0.0)  # pyright: ignore


def is_finite(tree: PyTree) -> jax.Array:
    """Whether every entry of every floating leaf is finite."""
    checks = [
        jnp.isfinite(leaf).all()
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return jnp.stack(checks).all() if checks else jnp.ones((), bool)


def take(tree: PyTree, index) -> PyTree:
    """Rows ``index`` of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def size(tree: PyTree) -> int:
    """The number of entries of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
