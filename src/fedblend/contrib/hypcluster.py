# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""HypCluster: several shared models, of which every client trains and uses the best.

In ``contrib``: no number of its paper is reproduced, no bound of it is checked.

The problem is ``min over theta_1 .. theta_M of sum_i p_i min over m of f_i(theta_m)``:
clients in M clusters, a model for each. A round, for every client i of the cohort::

    m   <- the model with the least f_i(theta_m), on all training rows of client i
    t_i <- theta_m, then steps times:  t_i <- t_i - rate * grad f_i(t_i; batch)
    theta_m <- theta_m + sum_i p_i (t_i - theta_m) / sum_i p_i,
               both sums over the clients that chose m

    personal_i = the model with the least f_i, of the newest models

The server receives two means over the cohort and divides them: of the changes, zero at
the models that a client did not choose, and of the choices, one at the chosen model. A
model that nobody chose stays. Parameters are those of ``models.ensemble``. An ensemble
of one model is FedAvg; ``fedem`` is the soft version. The same algorithm is known as
IFCA.

A new client takes the model with the least loss on its training rows, and no steps, so
that ``--steps`` and ``--rate`` do not apply.

Where this differs from the paper: it does not. Clients have no state: they choose again
in every round. What a client deploys is an ensemble with all weight on its model.

Reference: Mansour, Mohri, Ro, Suresh, "Three approaches for personalization with
applications to federated learning", 2020, arXiv:2002.10619.
"""

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.batches import everything
from fedblend.core import Algorithm, Loss, Needs, Up, Wire, start_with_params
from fedblend.local import Work, local_update
from fedblend.losses import gradient, objective
from fedblend.models.derived import (
    models_only,
    require_ensemble,
    set_weights,
    single_loss,
)
from fedblend.registry import SOLVES, algorithm


@algorithm(
    sends=("update", "choice"), form="ensemble", new_client=SOLVES, reads="losses"
)
def hypcluster(loss: Loss, work: Work) -> Algorithm:
    """Shared models, of which each client trains and deploys the one that fits best.

    Args:
        loss: ``loss(params, rows) -> losses[rows]`` of ``models.ensemble``.
        work: local work of a round, on the chosen model.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> rows = jnp.ones((8, 1)), jnp.repeat(jnp.arange(2), 4)
        >>> data = fb.federate(rows, [[0, 1, 2, 3], [4, 5, 6, 7]])
        >>> model = fb.models.ensemble(fb.models.softmax(1, 2), 2)
        >>> loss = fb.losses.cross_entropy(model.apply)
        >>> run = fb.simulate(
        ...     fb.algorithms.hypcluster(loss, fb.Work(1.0, steps=5, batch_size=None)),
        ...     model.init, data, jax.random.key(0), rounds=10).complete()
        >>> [int(run.personal(i).log_weights.argmax()) for i in (0, 1)]
        [0, 1]
    """
    own_loss = single_loss(loss)

    def choose(models, shard):
        """One at the model with the least loss, zero at the others."""
        batch = everything(shard)
        each = jax.vmap(lambda one: objective(own_loss, one, batch))(models)
        # NaN would be the least: a model that diverged is nobody's.
        least = jnp.where(jnp.isnan(each), jnp.inf, each).argmin()
        return jax.nn.one_hot(least, len(each), dtype=each.dtype)

    def enroll(params, shard, key):
        require_ensemble("hypcluster: params", params)
        return (), ()

    def client(down, client, shard, key):
        down = tell(down, ())
        choices = choose(down.shared.models, shard)
        shared, correction = (
            None if tree is None else trees.take(tree.models, choices.argmax())
            for tree in (down.shared, down.correction)
        )
        one = down._replace(shared=shared, correction=correction)
        up = local_update(gradient(own_loss), one, shard, key, work=work)

        def place(change):
            spread = jax.vmap(trees.scale, (0, None))(choices, change)
            return down.shared._replace(models=spread)

        delta, mean_gradient = place(up.delta), place(up.mean_gradient)
        return Up(delta, mean_gradient, {"hypcluster": choices}), client

    def server(aggregate, down, server, central, key):
        share = aggregate.mean.extra["hypcluster"]
        factor = 1 / jnp.where(share > 0, share, 1)
        step = jax.vmap(trees.scale)(factor, aggregate.mean.delta)
        return down._replace(shared=trees.add_where_given(down.shared, step)), server

    def personal(down, client, shard, key):
        return set_weights(down.shared.models, choose(down.shared.models, shard))

    def tell(down, request):
        shared, correction = map(models_only, (down.shared, down.correction))
        return down._replace(shared=shared, correction=correction)

    needs = Needs(mean=True)
    return Algorithm(
        enroll,
        start_with_params,
        client,
        server,
        personal,
        wire=Wire(tell=tell),
        needs=needs,
    )
