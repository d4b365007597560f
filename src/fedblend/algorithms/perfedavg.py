# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg: FedAvg on each client's loss after one gradient step of its own.

The problem is ``min over shared of sum_i p_i F_i(shared)`` with ``F_i(w) = f_i(w -
inner_rate * grad f_i(w))``. A round, for every client i of the cohort::

    y_i <- shared, then steps times, on batches D, D', D'' drawn independently:
           v   <- grad f_i(y_i - inner_rate * grad f_i(y_i; D); D')
           y_i <- y_i - rate * (v - inner_rate * H v),      H = hessian f_i(y_i; D'')
    shared <- shared + mean (y_i - shared)

    personal_i <- shared, then adapt_steps times:  z <- z - inner_rate * grad f_i(z)

``hessian`` is how H v is found: "exact" by autodiff, without the matrix (on full
batches the direction is the gradient of F_i); "differences", the paper's HF, ``(grad
f_i(y_i + delta v; D'') - grad f_i(y_i - delta v; D'')) / (2 delta)``; "none", its FO,
leaves it out. With one step and full batches the last is FOMAML with one inner step.

Where this differs from the paper: weights are those of the run (the paper's are equal:
``weights="uniform"``), and the outer steps may be any of optax's. All three batches
have ``batch_size`` rows of all that the client has; with None each is everything. D'
is what FedAvg would draw, so that an inner rate of 0 is FedAvg. A personal model is
made from the shared one when it is needed, on batches of the same size, and not stored;
the paper takes one step. ``down.correction`` is added to the gradient of F_i.

Reference: Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical
guarantees: a model-agnostic meta-learning approach", NeurIPS 2020, arXiv:2002.07948.
"""

from functools import partial
from typing import Annotated

import jax

from fedblend import trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.finetune import finetune
from fedblend.batch_statistics import refuse_statistics
from fedblend.checks import (
    NotNegative,
    Positive,
    Whole,
    words,
)
from fedblend.core import Algorithm, Loss
from fedblend.local import Work, local_update
from fedblend.losses import gradient
from fedblend.registry import ADAPTS, algorithm


def _exact(mean_gradient, params, vector, delta):
    return jax.jvp(mean_gradient, (params,), (vector,))[1]


def _differences(mean_gradient, params, vector, delta):
    step = trees.scale(delta, vector)
    ahead = mean_gradient(trees.add(params, step))
    behind = mean_gradient(trees.subtract(params, step))
    return trees.scale(0.5 / delta, trees.subtract(ahead, behind))


def _none(mean_gradient, params, vector, delta):
    return trees.zeros_like(vector)


_PRODUCTS = {"exact": _exact, "differences": _differences, "none": _none}
HESSIAN = words(*_PRODUCTS)


@algorithm(
    new_client=ADAPTS._replace(steps="adapt_steps", rate="inner_rate"),
    reads="second derivatives",
)
def perfedavg(
    loss: Loss,
    work: Work,
    *,
    inner_rate: NotNegative,
    hessian: Annotated[str, HESSIAN] = "exact",
    delta: Positive = 1e-3,
    adapt_steps: Whole = 1,
) -> Algorithm:
    """FedAvg on the losses after one local step; deploy the model after such steps.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``, twice differentiable.
        work: the outer steps: optimizer (its rate is the paper's beta), steps, and the
            rows of each of the three batches of a step.
        inner_rate: rate of the client's own step, the paper's alpha, 0 or more.
        hessian: how H v is computed: "exact" by autodiff, "differences" of gradients,
            or "none" to leave it out.
        delta: step of these differences, above 0; in float32 they lose digits below
            about 1e-3.
        adapt_steps: number of local steps before use, 0 or more.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> algorithm = fb.algorithms.perfedavg(
        ...     fb.datasets.quadratic_loss,
        ...     fb.Work(0.1, steps=1, batch_size=None),
        ...     inner_rate=0.05,
        ... )
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=50).complete()
        >>> measured = fb.metrics.mean_loss(fb.datasets.quadratic_loss)
        >>> own = fb.Batch(federation.train.rows(0))
        >>> bool(measured(run.personal(0), own) < measured(run.shared, own))
        True
    """
    mean_gradient, product = gradient(loss), _PRODUCTS[hessian]

    def direction(params, outer, inner, curved):
        step = trees.scale(inner_rate, mean_gradient(params, inner))
        after = mean_gradient(trees.subtract(params, step), outer)
        bend = product(lambda here: mean_gradient(here, curved), params, after, delta)
        return trees.subtract(after, trees.scale(inner_rate, bend))

    train = partial(local_update, direction, work=work, further=("inner", "hessian"))

    def client(down, client, shard, key):
        refuse_statistics("perfedavg", down.shared)
        return train(down, shard, key), client

    trained = fedavg(loss, work)._replace(client=client)
    adapt = Work(inner_rate, adapt_steps, work.batch_size)
    return finetune(trained, loss, adapt)
