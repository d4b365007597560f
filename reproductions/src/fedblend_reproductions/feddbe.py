# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedDBE: what is special about a client's features stays with it, as a shift of them.

No number of its paper is reproduced, no bound of it is checked. It runs in Python
alone: no configuration names it.

Parameters are those of ``shifted``: scores are ``head(features + shift_i)``. The
shift (the paper's personalized representation bias memory) stays with client i; a
penalty (its mean regularization) keeps the mean of the features themselves near one for
all, ``m``. A round, for every client i of the cohort::

    (y_i, shift_i) <- (shared, shift_i), then steps times, both from the old values:
        a step down the gradient of f_i(y_i, shift_i; batch)
        + kappa * mean over entries of (mean features of the batch at y_i - m)^2
    shared <- shared + sum_i p_i (y_i - shared)

    personal_i = shared with shift_i

``m`` comes by enrollment, and never changes: each client trains for one round alone,
without penalty and at the shift of the start, and sends the mean of its features in the
last batch, before the step on it. m is the mean over clients, and the server sends it
along with every message. With ``kappa = 0`` this is FedSim with the shift as
its personal part. The shift of features is a bias of the last layer for a linear one.

Where this differs from the paper: clients count equally unless the run sets other
weights. kappa is half of that in its authors' code, as far as copies of it show, whose
penalty has a factor 1/2. Its running mean of features, with momentum mu, is
here that of the batch, mu = 1, which the paper uses for its CNN. The mean over entries
in place of their sum is that of its authors' code, and so is the enrollment: at mu = 1
its running mean is the last batch's.

Reference: Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating domain bias for
federated learning in representation space", NeurIPS 2023, arXiv:2311.14975.
"""

from functools import wraps
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import trees
from fedblend.algorithms.partial import partial
from fedblend.batches import everything
from fedblend.checks import Instance, NotNegative, gate
from fedblend.core import Algorithm, Batch, Loss, PyTree, Up
from fedblend.errors import UserError
from fedblend.local import Work, descend, plan_steps, resolve
from fedblend.losses import gradient, objective
from fedblend.mixing import Apply
from fedblend.models.model import Model, Shape, join_halves

SHIFT = ("shift",)
PARTS = "model", "mean"
"""What enrollment moves."""


class Shifted(NamedTuple):
    """The parameters of a model, and what is added to its features."""

    model: PyTree
    shift: jax.Array


@gate(model=Instance(Model, "a Model"))
def shifted(model: Model, shape: Shape) -> Model:
    """``head(features(inputs) + shift)``, where the shift starts at zero.

    Args:
        model: has its halves, ``features`` and ``head``.
        shape: of the inputs of one row.

    Example:
        >>> from fedblend.models import mlp
        >>> model = shifted(mlp(4, 3, hidden=(8,)), (4,))
        >>> model.init(jax.random.key(0)).shift.shape
        (8,)
    """
    features, head = model.features, model.head
    if features is None or head is None:
        allowed = "a model with its halves, fb.Model(init, apply, features, head)"
        raise UserError("shifted: model", model, allowed, "one without them")

    def init(key):
        params = model.init(key)
        row = jnp.zeros((1, *shape), jnp.result_type(*jax.tree.leaves(params)))
        found = jax.eval_shape(features, params, row)
        return Shifted(params, jnp.zeros(found.shape[1:], found.dtype))

    @wraps(features, assigned=(), updated=())
    def own_features(params, inputs, **more):
        return features(params.model, inputs, **more)

    def own_head(params, values):
        return head(params.model, values + params.shift[None])

    return join_halves(init, own_features, own_head)


@gate()
def feddbe(
    loss: Loss, work: Work, *, features: Apply, kappa: NotNegative = 1.0
) -> Algorithm:
    """A shared model, and a shift of its features for each client.

    Args:
        loss: ``loss(params, rows) -> losses[rows]`` of ``shifted``.
        work: local work of a round, on the model and the shift.
        features: ``features`` of that model; the inputs of a row come first.
        kappa: strength of the pull on the mean of the features, 0 or more; the paper's
            is 50 for a CNN of four layers, else 1.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> rows = jnp.ones((8, 1)), jnp.repeat(jnp.arange(2), 4)
        >>> data = fb.federate(rows, [[0, 1, 2, 3], [4, 5, 6, 7]])
        >>> model = shifted(fb.models.mlp(1, 2, hidden=(4,)), (1,))
        >>> loss = fb.losses.cross_entropy(model.apply)
        >>> work = fb.Work(0.5, steps=5, batch_size=None)
        >>> algorithm = feddbe(loss, work, features=model.features)
        >>> run = fb.simulate(algorithm, model.init, data, jax.random.key(0),
        ...                   rounds=20).complete()
        >>> bool(jnp.abs(run.client(0).personal.shift).max() > 0.1)
        True
    """
    inner = partial(loss, work, personal=SHIFT, order="together")

    def mean_features(params, batch: Batch):
        found = features(params, batch.rows[0])
        counts = jnp.ones(len(found), bool) if batch.mask is None else batch.mask
        kept = counts.reshape(-1, *(1,) * (found.ndim - 1))
        total = jnp.where(kept, found, 0).sum(axis=0)
        return total / jnp.maximum(counts.sum(), 1).astype(total.dtype)

    def enroll(params, shard, key):
        if not isinstance(params, Shifted):
            allowed = "one with shifted features, shifted(model, shape)"
            said = "a model without shift"
            raise UserError("feddbe: params", params, allowed, said)

        def direction(here, batch):
            own = params._replace(model=here[0])
            found = mean_features(own, batch)
            return gradient(loss)(own, batch).model, found - here[1]

        # The optimizer moves the model; the mean moves all the way to the batch's.
        rule = resolve(work.optimizer, 0, plan_steps(shard, work)[0])
        rules = optax.partition({"model": rule, "mean": optax.identity()}, PARTS)
        own_work = work._replace(optimizer=rules)
        shape = jax.eval_shape(mean_features, params, everything(shard))
        first = params.model, jnp.zeros_like(shape)
        (_, mean), _ = descend(direction, first, shard, key, work=own_work)
        _, state = inner.enroll(params, shard, key)
        return mean, state

    def start(params, joins, central, key):
        down, server = inner.start(params, joins, central, key)
        return down._replace(extra={"feddbe": joins.mean}), server

    def client(down, client, shard, key):
        told = inner.wire.tell(down, ())

        def pull(here, batch):
            gap = mean_features(here, batch) - down.extra["feddbe"]
            return objective(loss, here, batch) + kappa * jnp.square(gap).mean()

        reached, mean_gradient = descend(
            jax.grad(pull),
            trees.fill(told.shared, client.personal),
            shard,
            key,
            work=work,
            round=down.round,
            correction=told.correction,
        )
        shared, sloped = (
            trees.where_given(told.shared, tree) for tree in (reached, mean_gradient)
        )
        own = client.personal._replace(shift=reached.shift)
        up = Up(trees.subtract(shared, told.shared), sloped)
        return up, client._replace(personal=own)

    return inner._replace(enroll=enroll, start=start, client=client)
