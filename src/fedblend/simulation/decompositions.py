# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Decompositions of many matrices on a CPU, a few at a time.

jaxlib hands a large batch of matrices to XLA's threads in parts, and the thread that
does so waits for them. XLA runs independent operations, and those of all devices, in
the same threads: as soon as every thread waits for parts, no thread is left to compute
one, and the program stands still for ever. A larger pool only makes that rarer, since a
loss may decompose more matrices than there are threads.

A batch that is small enough is decomposed by the thread that asks for it. So a large
batch becomes a loop over small ones here. Each matrix is still decomposed by itself:
results keep their bits.
"""

import math
from typing import Any

import jax

RANKS = {
    "cholesky": 2,
    "eig": 2,
    "eigh": 2,
    "geqp3": 2,
    "geqrf": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}
"""Primitives that jaxlib shares among threads: the axes of one matrix (or diagonal)."""
TOGETHER = 2**12
"""Cubes of rows in a small batch. jaxlib counts at most 30 operations for each, and
shares out batches from 200,000 operations on."""


def in_small_batches(program: Any) -> Any:
    """A jaxpr without large batches of decompositions; the same one if it has none."""
    steps = [_small_batches(step) for step in program.eqns]
    changed = any(new is not old for new, old in zip(steps, program.eqns, strict=True))
    return program.replace(eqns=steps) if changed else program


def _small_batches(step: Any) -> Any:
    """One step of a jaxpr, and the jaxprs inside it."""
    if step.primitive.name in RANKS:
        return _in_turns(step)
    leaves, tree = jax.tree.flatten(step.params, is_leaf=_is_program)
    found = [_inside(leaf) if _is_program(leaf) else leaf for leaf in leaves]
    if all(new is old for new, old in zip(found, leaves, strict=True)):
        return step
    return step.replace(params=tree.unflatten(found))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns")


def _inside(value: Any) -> Any:
    """A jaxpr that a step calls, with its constants or without."""
    inner = getattr(value, "jaxpr", value)
    found = in_small_batches(inner)
    if found is inner:
        return value
    return found if inner is value else value.replace(jaxpr=found)


def _in_turns(step: Any) -> Any:
    """A decomposition of a large batch as a call of a loop over small ones."""
    shapes = [one.aval.shape for one in step.invars]
    axes = len(shapes[0]) - RANKS[step.primitive.name]
    batch = shapes[0][:axes]
    most = max(TOGETHER // max(max(shape[axes:]) for shape in shapes) ** 3, 1)
    if math.prod(batch) <= most:
        return step

    def one(operands):
        return step.primitive.bind(*operands, **step.params)

    @jax.jit
    def loop(*operands):
        rows = [leaf.reshape(-1, *leaf.shape[axes:]) for leaf in operands]
        found = jax.lax.map(one, rows, batch_size=most)
        return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), found)

    given = [jax.ShapeDtypeStruct(of.aval.shape, of.aval.dtype) for of in step.invars]
    (call,) = jax.make_jaxpr(loop)(*given).eqns
    return call.replace(invars=step.invars, outvars=step.outvars)
