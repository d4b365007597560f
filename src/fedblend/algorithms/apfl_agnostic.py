# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Agnostic APFL: APFL over the shared model of agnostic FL.

The shared problem is ``min over shared, max over q in the simplex of sum_i q_i
f_i(shared)`` in place of the plain mean; client i deploys ``mix_i = alpha_i shared +
(1 - alpha_i) v_i``. A round, for every client i of the cohort, n being all of them::

    w_i, v_i, alpha_i <- the local steps of ``apfl`` from shared, v_i, alpha_i
    shared <- shared + mean n q_i (w_i - shared)
    q      <- projection on the simplex of  q + q_rate * mean n f_i(shared) e_i

with f_i at the old ``shared``, and q uniform at first. The local work is that of
``apfl``; the weights, the ascent in q and the messages for it are those of
``agnostic``. So the shared model and q are those of agnostic FL, whatever v and alpha
do, and with alpha = 1 this is agnostic FL. A client whose q_i is 0 does not move the
shared model, and trains v_i as any other does.

Where this differs from the paper: the paper states the shared problem alone, without a
method or its analysis. This is the composition of its Algorithm 1 with the descent and
ascent of Mohri et al., and no theorem of either covers it. Alpha is the weight of the
shared model. With ``held_out`` the ascent in q uses the losses of all training rows.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461, appendix; Mohri, Sivek, Suresh, "Agnostic federated learning", ICML
2019, arXiv:1902.00146.
"""

from fedblend.algorithms.agnostic import weighed
from fedblend.algorithms.apfl import apfl
from fedblend.algorithms.apfl_alpha import RULES, Learn
from fedblend.checks import COUNT, NOT_NEGATIVE, ByClient, gate
from fedblend.core import Algorithm, Loss
from fedblend.local import WORK, Optimizer, Work
from fedblend.registry import STEP_BY_STEP, algorithm


@algorithm(
    sends=("update", "losses"),
    new_client=STEP_BY_STEP._replace(build=apfl),
    reads="losses",
)
@gate(**WORK, **RULES, clients=COUNT, q_rate=NOT_NEGATIVE)
def apfl_agnostic(
    loss: Loss,
    work: Work,
    *,
    clients: int,
    q_rate: float,
    alpha: ByClient,
    learn: Learn = "step",
    alpha_rate: Optimizer | None = None,
    held_out: float = 0.0,
) -> Algorithm:
    """Agnostic FL's shared model, a personal model and mixing weight on every client.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
        clients: number of clients.
        q_rate: step of the ascent in q, 0 or more.
        alpha: first weight of the shared model; a number, or an array over clients.
        learn: when alpha moves: "step", "round" (with the first step) or "fixed".
        alpha_rate: optimizer of alpha, a number for plain steps; None for that of
            ``work``.
        held_out: fraction of a client's training rows on which alpha alone learns.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> algorithm = fb.apfl_agnostic(
        ...     fb.datasets.quadratic_loss,
        ...     fb.Work(0.1, steps=2, batch_size=None),
        ...     clients=4,
        ...     q_rate=0.1,
        ...     alpha=0.5,
        ... )
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=20).complete()
        >>> run.down.extra["agnostic"].shape  # q
        (4,)
    """
    own = apfl(
        loss, work, alpha=alpha, learn=learn, alpha_rate=alpha_rate, held_out=held_out
    )
    return weighed(
        own, loss, clients=clients, q_rate=q_rate, batch_size=work.batch_size
    )
