# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL: every client learns a model of its own, and how much of it to mix in.

Client i deploys ``mix_i = alpha_i shared + (1 - alpha_i) v_i``, with v_i its own model.
A round, for every client i of the cohort; w_i is its copy of the shared model::

    w_i <- shared, then steps times, on a batch, all from the old w_i, v_i and alpha_i:
        w_i     <- w_i - rate * grad f_i(w_i)                              (6)
        v_i     <- v_i - rate * grad in v_i of f_i(mix_i)                  (7)
        alpha_i <- alpha_i - rate * <w_i - v_i, grad f_i(mix_i)>,          (10)
                   put back into [0, 1]
    shared <- mean of w_i                                                  (8)

Autodiff writes (7), with its factor ``1 - alpha_i``, and (10). Others keep their v_i.

Where this differs from the paper: its alpha is the weight of v, here it is that of the
shared model, as everywhere. (10) is indexed by steps while the text says once per
round: ``learn`` has both. (10) looks at the rows that v_i is fitted to, which cannot
tell what generalizes; ``held_out`` keeps rows back from w_i and v_i and moves alpha on
those, ``hand_back`` until some round. Other weights than the paper's uniform ones, any
optimizer and a rate of alpha's own are allowed. ``apfl_averaged`` has the averages of
its theorems. For any fixed alpha < 1 long training leads mix_i to client i's own
minimizer, whatever the shared model is (with more than one step a round up to a drift
that falls with the rate): alpha acts through how long and with which rates one trains.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461.
"""

import math

import jax

from fedblend import mixing
from fedblend.algorithms.apfl_alpha import HAND_BACK, RULES, check_held_out
from fedblend.algorithms.apfl_parts import Parts, Variables, assembled
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import FLAG, ByClient, gate
from fedblend.core import Algorithm, Loss
from fedblend.local import WORK, Optimizer, Work
from fedblend.losses import gradient, objective
from fedblend.mixing import MIXING, Mixing
from fedblend.registry import STEP_BY_STEP, algorithm
from fedblend.shards import per_client
from fedblend.solvers import Solver


@algorithm(new_client=STEP_BY_STEP._replace(options={"aggregated": True}))
@gate(**WORK, **RULES, hand_back=HAND_BACK, fresh=FLAG, mix=MIXING, aggregated=FLAG)
def apfl(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    learn: str = "step",
    alpha_rate: Optimizer | None = None,
    held_out: float = 0.0,
    hand_back: float = math.inf,
    fresh: bool = False,
    mix: Mixing = mixing.parameters,
    local: Solver | None = None,
    aggregated: bool = True,
) -> Algorithm:
    """A shared model as FedAvg's, and at every client a model and a weight of its own.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: local work; its optimizer is that of w and of v, each on its own.
        alpha: weight of the shared model, at first; a number, or an array over clients.
        learn: when alpha moves: "step", "round" (with the first step) or "fixed".
        alpha_rate: of alpha, a number for plain steps; None for ``optimizer`` itself.
        held_out: fraction of a client's training rows on which alpha alone learns, in
            batches of ``batch_size``; 0 for the batches of w and v. A client with too
            few rows to hold out one keeps its alpha.
        hand_back: rounds after which held-out rows are trained on as well, and alpha
            stays; infinity for never.
        fresh: v (and alpha) have a batch of their own instead of that of w.
        mix: ``mixing.parameters`` or ``mixing.outputs``.
        local: how v starts, from ``pure_local``; None for the initial parameters.
        aggregated: the client deploys its v mixed with the shared model it is told,
            else with its own last w, that is as it was before the server averaged.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> algorithm = fb.apfl(
        ...     fb.datasets.quadratic_loss,
        ...     fb.Work(0.1, steps=2, batch_size=None),
        ...     alpha=0.5,
        ... )
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=50).complete()
        >>> measured = fb.metrics.mean_loss(fb.datasets.quadratic_loss)
        >>> own = fb.Batch(federation.train.rows(0))
        >>> bool(measured(run.personal(0), own) < measured(run.shared, own))
        True
    """
    check_held_out(learn, held_out, hand_back)

    def mixed(personal, alpha, shared, batch):
        return objective(loss, mix(alpha, shared, personal), batch)

    def direction(here: Variables, batch, own, judge) -> Variables:
        def gradients(which, batch):
            return jax.grad(mixed, which)(here.personal, here.alpha, here.shared, batch)

        first = gradient(loss)(here.shared, batch)
        if judge is own:  # both of one pass
            return Variables(first, *gradients((0, 1), own))
        return Variables(first, gradients(0, own), gradients(1, judge))

    parts = Parts(
        lambda params, shard: per_client(alpha, shard),
        mix,
        learn,
        alpha_rate,
        held_out,
        hand_back,
        fresh,
        local,
        aggregated,
    )
    inner = fedavg(loss, work)
    uniform = inner._replace(needs=inner.needs._replace(weights="uniform"))
    return assembled(uniform, direction, work, parts)
