# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Hierarchical model: a shared model, and own deviations found by Newton's method.

The problem, with n_i rows at client i, N in all, and f_i the mean loss of its rows::

    min over shared, d_1 .. d_n of
        sum_i n_i f_i(shared + d_i) + 1/2 sum_ij d_ij^2 / v_j + N/2 sum_j r_j shared_j^2

For an intercept (a leaf named "bias") v_j is ``level`` and r_j is 0; for all other
parameters v_j is ``slopes`` and r_j is ``ridge``. This is L2GD's objective with a
penalty for each kind of parameter. For squared errors the optimum is that of a linear
mixed model, v being the variance of the clients' deviations over that of the noise. No
variance keeps a parameter the same for all: ``level = slopes = 0`` is the model that
FedAvg looks for, ``slopes = 0`` one model with own intercepts. A round, with
d_i = V^(1/2) u_i::

    u_i    <- ``steps`` Newton steps on  f_i(shared + V^(1/2) u) + |u|^2 / (2 n_i)
    sends     n_i, and n_i times that minimum's gradient and Hessian in shared
    shared <- shared - rate * (sum Hessian + N R)^-1 (sum gradient + N R shared)

    personal_i = shared + V^(1/2) u_i

For squared errors one round of one step is exact: ``fb.one_letter`` for variances that
are known. The server needs sums alone, which secure sums hide. Classes take about 8
rounds, and up to 16 where inputs separate them and penalties are small: scores grow by
about one per round. A message has p (p + 3) / 2 + 1 numbers for p parameters: this is
for models of at most some hundreds. A client with fewer rows than parameters can be
read from it: its Hessian has these rows' span. Nodes refuse that without noise for
rows. With it (``fb.transforms.row_noise``) f_i is a noisy quadratic around ``shared``:
for squared errors a message is one evaluation of the noise, and a personal model one
more. Clients keep no state. With ``share = False`` nothing travels: every client has
the ridge regression of its own rows, with d_i from the initial parameters.

Where this differs from the paper: L2GD takes random gradient steps toward the same
optimum.

Reference: Hanzely, Richtárik, "Federated learning of a mixture of global and local
models", 2020, arXiv:2002.05516.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.batch_statistics import refuse_statistics
from fedblend.batches import draw
from fedblend.checks import NotNegative
from fedblend.core import Algorithm, Loss, Needs, PyTree, Up, Wire, start_with_params
from fedblend.errors import UserError
from fedblend.local import Work, plan_steps
from fedblend.losses import HiddenLoss, objective
from fedblend.registry import ADAPTS, algorithm
from fedblend.solvers import newton_step, solve_system


class HierarchicalClient(NamedTuple):
    """The state of a client: what it deviates from where nothing is shared."""

    start: PyTree


class _Own(NamedTuple):
    """A client's deviation, and what its message is made of; vectors."""

    shared: jax.Array
    u: jax.Array
    scale: jax.Array
    """V^(1/2)."""
    loss: Callable[[jax.Array], jax.Array]
    rows: jax.Array

    @property
    def model(self) -> jax.Array:
        return self.shared + self.scale * self.u


def _fill_kinds(params: PyTree, level: Any, others: Any) -> jax.Array:
    """A vector over the parameters: one number for intercepts, one for the others."""

    def each(path, leaf):
        value = level if path.split("/")[-1] == "bias" else others
        return jnp.full(leaf.shape, value, leaf.dtype)

    return trees.ravel(trees.map_with_path(each, params))[0]


@algorithm(sends=("update", "hessian"), new_client=ADAPTS)
def hierarchical(
    loss: Loss,
    work: Work,
    *,
    level: NotNegative = 1.0,
    slopes: NotNegative = 0.0,
    ridge: NotNegative = 0.0,
    share: bool = True,
) -> Algorithm:
    """A shared model and own deviations, found by Newton's method.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``, convex.
        work: length of the server's step (1 is Newton's), Newton steps of a client on
            its deviation, and rows that it uses per round (None for all).
        level: variance of own intercepts over that of a row's noise; 0 for none.
        slopes: the same for all other parameters.
        ridge: penalty on the shared parameters that are no intercepts.
        share: whether there is a shared model; without, every client trains alone.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, optimum = fb.datasets.quadratics(clients=4, dim=2)
        >>> algorithm = fb.algorithms.hierarchical(
        ...     fb.datasets.quadratic_loss, fb.Work(1.0, steps=1, batch_size=None)
        ... )
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=1, weights="uniform")
        >>> bool(jnp.allclose(run.complete().shared, optimum, atol=1e-4))
        True
    """
    if not isinstance(work.optimizer, int | float | jax.Array):
        allowed = "a number, the length of the server's Newton step"
        raise UserError("hierarchical: work: optimizer", work.optimizer, allowed)

    # Known when it is compiled, this saves what a client solves.
    same = all(isinstance(of, int | float) and of == 0 for of in (level, slopes))

    def own(params, shard, key):
        refuse_statistics("hierarchical", params)
        shared, layout = trees.ravel(params)
        batch = draw(shard, key, work.batch_size)
        rows = jnp.maximum(shard.count, 1).astype(shared.dtype)
        scale = jnp.sqrt(_fill_kinds(params, level, slopes))

        def mean(vector):
            return objective(loss, trees.unravel(vector, layout), batch)

        noisy = isinstance(loss, HiddenLoss)
        local = loss.expand(params, batch) if noisy else mean

        def value(u):
            return local(shared + scale * u) + 0.5 * jnp.vdot(u, u) / rows

        steps, _ = plan_steps(shard, work)

        def goes_on(carry):
            number, before, u = carry
            # Without a variance there is nothing to find.
            return (number == 0) | (number < steps) & (u != before).any()

        def step(carry):
            number, _, u = carry
            return number + 1, u, newton_step(value, u)

        first = jnp.zeros_like(shared)
        if same:
            return _Own(shared, first, scale, local, rows), layout
        u = jax.lax.while_loop(goes_on, step, (0, first, first))[2]
        return _Own(shared, u, scale, local, rows), layout

    def enroll(params, shard, key):
        return (), () if share else HierarchicalClient(params)

    def client(down, client, shard, key):
        if not share:
            return Up(delta=None), client
        found, layout = own(down.shared, shard, key)
        slope = jax.grad(found.loss)(found.model)
        curve = jax.hessian(found.loss)(found.model)
        raw = slope
        if not same:
            # The minimum over u, to second order in shared: a Schur complement.
            cross = curve * found.scale[None]
            inner = jnp.diag(1 / found.rows + 0 * slope) + found.scale[:, None] * cross
            right = found.scale * slope + found.u / found.rows
            solved = solve_system(inner, jnp.column_stack([cross.T, right]))
            raw, curve = slope - cross @ solved[:, -1], curve - cross @ solved[:, :-1]
        raw = trees.unravel(raw, layout)
        places = jnp.triu_indices(len(slope))
        gradient = trees.add_where_given(raw, down.correction)
        sums = found.rows * jnp.append(curve[places], 1)
        return Up(
            trees.scale(found.rows, gradient),
            mean_gradient=raw,
            extra={"hierarchical": sums},
        ), client

    def server(aggregate, down, server, central, key):
        if not share:
            return down, server
        shared, layout = trees.ravel(down.shared)
        wide = jnp.promote_types(shared.dtype, jnp.float32)
        sums = aggregate.mean.extra["hierarchical"]
        sums, rows = sums[:-1], sums[-1]
        penalty = rows * _fill_kinds(down.shared, 0.0, ridge)
        gradient = trees.ravel(aggregate.mean.delta)[0] + penalty * shared
        places = jnp.triu_indices(len(shared))
        upper = jnp.zeros((len(shared),) * 2, shared.dtype).at[places].set(sums)
        curve = upper + jnp.triu(upper, 1).T + jnp.diag(penalty)
        # Softmax leaves a direction free, in which rounding alone would decide: no step
        # there, and the optimum stays. Units of inputs do not decide what is free.
        curve, diagonal = curve.astype(wide), jnp.diagonal(curve).astype(wide)
        known = diagonal > 0
        unit = jnp.where(known, jax.lax.rsqrt(jnp.where(known, diagonal, 1)), 0)
        values, axes = jnp.linalg.eigh(jnp.outer(unit, unit) * curve)
        bent = values > 10 * jnp.finfo(wide).eps * values[-1]
        slope = axes.T @ (unit * gradient)
        along = jnp.where(bent, slope, 0) / jnp.where(bent, values, 1)
        rate = jnp.asarray(work.optimizer, shared.dtype)
        moved = shared - rate * (unit * (axes @ along)).astype(shared.dtype)
        return down._replace(shared=trees.unravel(moved, layout)), server

    def personal(down, client, shard, key):
        found, layout = own(down.shared if share else client.start, shard, key)
        return trees.unravel(found.model, layout)

    # Clients weigh by what they send.
    needs = Needs(mean=True, uniform=True, weights="uniform")
    found = Algorithm(enroll, start_with_params, client, server, personal, needs=needs)
    if share:
        return found
    return found._replace(
        wire=Wire(
            tell=lambda down, request: down._replace(shared=None, correction=None)
        )
    )
