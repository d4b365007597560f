# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of the loss of one row, those of dense layers as factors of a product.

The weights W of a layer ``y = x W`` that sees one vector x per row have the gradient
``x (dloss/dy)^T``. Its norm is the product of two norms, and a weighted sum of such
gradients over rows is a product of two matrices: no gradient of the size of W is made
for any row. All other parameters have their gradients as they are.

Reference: Goodfellow, "Efficient per-example gradient computations", arXiv 1510.01799.
"""

from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from fedblend.core import Batch, Key, Loss, PyTree
from fedblend.losses import row_losses


class RowGradient(NamedTuple):
    """The gradient of the loss of a row; each leaf of the parameters is in one list."""

    whole: dict[int, jax.Array]
    """Gradients of leaves, by the leaf's number."""
    factors: dict[int, tuple[jax.Array, jax.Array]]
    """Of weights of dense layers, two vectors: their outer product is the gradient."""


def row_gradient(
    loss: Loss, params: PyTree, row: PyTree, key: Key | None = None
) -> RowGradient:
    """The gradient of ``loss`` in the parameters at a single row, which is no batch.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        params: where.
        row: without an axis of rows.
        key: of the row, in training.
    """
    leaves, structure = jax.tree.flatten(params)

    def loss_of(*leaves):
        batch = Batch(jax.tree.map(lambda leaf: leaf[None], row), key=key)
        return row_losses(loss, jax.tree.unflatten(structure, leaves), batch)[0]

    traced = jax.make_jaxpr(loss_of)(*leaves)
    dense = _dense_layers(traced.jaxpr)
    shapes = {at: layer.equation.outvars[0].aval for at, layer in dense.items()}
    added = {at: jnp.zeros(out.shape, out.dtype) for at, out in shapes.items()}
    whole = {at: leaf for at, leaf in enumerate(leaves) if at not in dense}

    def value(whole, added):
        used = [whole.get(at, leaf) for at, leaf in enumerate(leaves)]
        return _evaluate(traced, used, dense, added)

    slopes, seen = jax.grad(value, argnums=(0, 1), has_aux=True)(whole, added)
    pairs = {at: (seen[at].reshape(-1), slopes[1][at].reshape(-1)) for at in dense}
    turned = {
        at: pairs[at][::-1] if dense[at].transposed else pairs[at] for at in pairs
    }
    return RowGradient(slopes[0], turned)


def sum_squares(gradient: RowGradient) -> jax.Array:
    """Of the gradient of one row, at least in float32: half precision overflows."""

    def squares(leaf):
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        return jnp.square(leaf.astype(wide)).sum()

    parts = [squares(leaf) for leaf in gradient.whole.values()]
    for left, right in gradient.factors.values():
        parts.append(squares(left) * squares(right))
    return sum(parts, jnp.zeros(()))


def sum_weighted(gradients: RowGradient, weights: jax.Array, params: PyTree) -> PyTree:
    """Of the gradients of several rows; rows of weight 0 may have any gradient.

    Args:
        gradients: stacked, [rows, ...].
        weights: [rows].
        params: whose structure the sum has.
    """

    def drop_unused(leaf):
        known = (weights != 0).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(known, leaf, 0)

    def total(leaf):
        return jnp.tensordot(weights.astype(leaf.dtype), drop_unused(leaf), 1)

    found = {at: total(leaf) for at, leaf in gradients.whole.items()}
    for at, (left, right) in gradients.factors.items():
        found[at] = (
            drop_unused(left) * weights[:, None].astype(left.dtype)
        ).T @ drop_unused(right)
    structure = jax.tree.structure(params)
    return jax.tree.unflatten(structure, [found[at] for at in sorted(found)])


class _Layer(NamedTuple):
    """The equation ``y = x W``; a parameter may be the transpose of W."""

    equation: Any
    transposed: bool


def _dense_layers(jaxpr: Any) -> dict[int, _Layer]:
    """Those that see one vector, by the number of their input W, used nowhere else."""
    places = {id(var): (number, False) for number, var in enumerate(jaxpr.invars)}
    operands = [var for equation in jaxpr.eqns for var in equation.invars]
    uses = Counter(id(var) for var in (*operands, *jaxpr.outvars))
    found = {}
    for equation in jaxpr.eqns:
        inputs = equation.invars
        place, transposed = places.get(id(inputs[-1]), (0, False)) if inputs else (0, 0)
        if not inputs or id(inputs[-1]) not in places or uses[id(inputs[-1])] != 1:
            continue
        if equation.primitive is lax.transpose_p and inputs[0].aval.ndim == 2:
            places[id(equation.outvars[0])] = place, not transposed
        if equation.primitive is not lax.dot_general_p or inputs[1].aval.ndim != 2:
            continue
        x, ((x_axes, axes), mapped) = (
            inputs[0].aval,
            equation.params["dimension_numbers"],
        )
        one_vector = x_axes == (x.ndim - 1,) and x.size == x.shape[-1]
        types = {x.dtype, inputs[1].aval.dtype, equation.outvars[0].aval.dtype}
        if mapped == ((), ()) and one_vector and len(types) == 1:
            found[place] = _Layer(equation, transposed != (axes == (1,)))
    return found


def _evaluate(
    traced: core.ClosedJaxpr,
    leaves: list[jax.Array],
    dense: dict[int, _Layer],
    added: dict[int, jax.Array],
) -> tuple[jax.Array, dict[int, jax.Array]]:
    """The program's value with ``added`` to dense layers, and what these layers see."""
    numbers = {id(layer.equation): number for number, layer in dense.items()}
    jaxpr, seen = traced.jaxpr, {}
    known = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    known |= dict(zip(jaxpr.invars, leaves, strict=True))

    def read(var):
        return var.val if isinstance(var, core.Literal) else known[var]

    for equation in jaxpr.eqns:
        values = [read(var) for var in equation.invars]
        options = equation.primitive.get_bind_params(equation.params)
        with equation.ctx.manager:
            found = equation.primitive.bind(*values, **options)
        if (number := numbers.get(id(equation))) is not None:
            seen[number] = values[0]
            found = found + added[number]
        several = equation.primitive.multiple_results
        known |= dict(zip(equation.outvars, found if several else [found], strict=True))
    return read(jaxpr.outvars[0]), seen
