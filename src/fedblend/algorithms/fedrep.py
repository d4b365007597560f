# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedRep: a shared body, and a head that stays with each client.

The problem is ``min over body, head_1 .. head_n of 1/n sum_i f_i(body, head_i)``, body
and head being two parts of the parameters. A round, for every client i of the cohort::

    head_i <- head_steps times:  head_i <- head_i - rate * grad_head f_i(body, head_i)
    b_i    <- body, then steps times:  b_i <- b_i - rate * grad_body f_i(b_i, head_i)
    body   <- body + mean (b_i - body)

    personal_i = body with head_i

Only the body travels, in both directions, and only it is counted: where the head is, a
message has None. Where everything is body it is FedAvg, where everything is head it is
training alone. ``shared`` has the head that everybody began with: no model to use.

It is ``partial`` with the head personal, which alternates.

Where this differs from the paper: it does not, with plain SGD; its analysis takes exact
minima for heads. A client that never took part still has the initial head.

Reference: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations
for personalized federated learning", ICML 2021, arXiv:2102.07078.
"""

from fedblend.algorithms.partial import Paths, partial
from fedblend.checks import PATHS, gate
from fedblend.core import Algorithm, Loss
from fedblend.local import STEPS, WORK, Steps, Work
from fedblend.registry import NewClient, algorithm


@algorithm(keeps="head", new_client=NewClient(steps="head_steps"), preset_of="partial")
@gate(**WORK, head=PATHS, head_steps=STEPS)
def fedrep(loss: Loss, work: Work, *, head: Paths, head_steps: Steps) -> Algorithm:
    """A shared body and personal heads, trained in turn.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work on the body; its optimizer and batch size also serve the head.
        head: names of the parts of the model that are the head, such as ["last"]; or
            a function of a path, such as "last/weight".
        head_steps: number of steps on the head in a round, an array over clients, or
            ``Epochs``.

    Example:
        >>> import jax, fedblend as fb
        >>> model = fb.models.mlp(4, 3, hidden=(8,))
        >>> loss = fb.losses.cross_entropy(model.apply)
        >>> algorithm = fb.fedrep(
        ...     loss,
        ...     fb.Work(0.1, steps=1, batch_size=10),
        ...     head=lambda path: path.startswith("last"),
        ...     head_steps=5,
        ... )
        >>> _, state = algorithm.enroll(model.init(jax.random.key(0)), None, None)
        >>> sum(leaf.size for leaf in jax.tree.leaves(state))
        27
    """
    return partial(loss, work, personal=head, personal_steps=head_steps)
