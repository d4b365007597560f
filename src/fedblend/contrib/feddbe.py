# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedDBE: what is special about a client's features stays with it, as a shift of them.

In ``contrib``: no number of its paper is reproduced, no bound of it is checked.

Parameters are those of ``models.shifted``: scores are ``head(features + shift_i)``. The
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

A new client trains a shift of its own while the shared model stays fixed.

Where this differs from the paper: clients count equally unless the run sets other
weights. kappa is half of that in its authors' code, as far as copies of it show, whose
penalty has a factor 1/2. Its running mean of features, with momentum mu, is
here that of the batch, mu = 1, which the paper uses for its CNN. The mean over entries
in place of their sum is that of its authors' code, and so is the enrollment: at mu = 1
its running mean is the last batch's.

Reference: Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating domain bias for
federated learning in representation space", NeurIPS 2023, arXiv:2311.14975.
"""

import jax
import jax.numpy as jnp
import optax

from fedblend import trees
from fedblend.algorithms.partial import partial
from fedblend.batches import everything
from fedblend.checks import NotNegative
from fedblend.core import Algorithm, Batch, Loss, Up
from fedblend.errors import UserError
from fedblend.local import Work, descend, plan_steps, resolve
from fedblend.losses import gradient, objective
from fedblend.mixing import Apply
from fedblend.models.derived import Shifted
from fedblend.registry import STEP_BY_STEP, algorithm

SHIFT = ("shift",)
PARTS = "model", "mean"
"""What enrollment moves."""


def own_shift(loss: Loss, work: Work) -> Algorithm:
    """What a new client runs: steps on its shift, with the shared model."""
    return partial(loss, work, personal=SHIFT)


@algorithm(
    sends=("update", "features"),
    reads="features",
    form="shifted",
    new_client=STEP_BY_STEP._replace(build=own_shift),
)
def feddbe(
    loss: Loss, work: Work, *, features: Apply, kappa: NotNegative = 1.0
) -> Algorithm:
    """A shared model, and a shift of its features for each client.

    Args:
        loss: ``loss(params, rows) -> losses[rows]`` of ``models.shifted``.
        work: local work of a round, on the model and the shift.
        features: ``features`` of that model; the inputs of a row come first.
        kappa: strength of the pull on the mean of the features, 0 or more; the paper's
            is 50 for a CNN of four layers, else 1.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> rows = jnp.ones((8, 1)), jnp.repeat(jnp.arange(2), 4)
        >>> data = fb.federate(rows, [[0, 1, 2, 3], [4, 5, 6, 7]])
        >>> model = fb.models.shifted(fb.models.mlp(1, 2, hidden=(4,)), (1,))
        >>> loss = fb.losses.cross_entropy(model.apply)
        >>> work = fb.Work(0.5, steps=5, batch_size=None)
        >>> algorithm = fb.algorithms.feddbe(loss, work, features=model.features)
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
            allowed = "one with shifted features, fb.models.shifted(model, shape)"
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
