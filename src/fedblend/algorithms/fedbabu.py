# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedBABU: a shared body is trained under a head that never moves, then fine-tuned.

Everybody has the same head, the initial one. A round, for every client i of the
cohort::

    b_i  <- body, then steps times:  b_i <- b_i - rate * grad_body f_i(b_i, head)
    body <- body + mean (b_i - body)

    personal_i = (body, head) after tuning_steps steps on f_i

Only the body travels. It is ``partial`` with the head personal and no steps on it,
and fine-tuning when a client deploys its model. ``shared`` is the body with the initial
head, the paper's global model.

Where this differs from the paper: it compares fine-tuning of the whole model, of the
head and of the body, and ``tuned`` has the first two. Weights are uniform unless the
run sets others. With ``tuned="head"`` an optimizer that decays weights moves the body
too.

Reference: Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image
classification", ICLR 2022, arXiv:2106.06042.
"""

import jax

from fedblend import trees
from fedblend.algorithms.finetune import finetune
from fedblend.algorithms.partial import Paths, partial
from fedblend.checks import PATHS, gate, optional, words
from fedblend.core import Algorithm, Loss
from fedblend.local import OPTIMIZER, STEPS, WORK, Optimizer, Steps, Work
from fedblend.losses import of
from fedblend.registry import NewClient, algorithm


@algorithm(
    keeps="head",
    new_client=NewClient(visits=0, steps="tuning_steps"),
    preset_of="partial",
    trains_kept=False,
)
@gate(
    **WORK,
    head=PATHS,
    tuning_steps=STEPS,
    tuning_rate=optional(OPTIMIZER),
    tuned=words("model", "head"),
)
def fedbabu(
    loss: Loss,
    work: Work,
    *,
    head: Paths,
    tuning_steps: Steps,
    tuning_rate: Optimizer | None = None,
    tuned: str = "model",
) -> Algorithm:
    """A shared body, trained under a fixed head; clients fine-tune what they deploy.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work on the body; its batch size also serves the fine-tuning.
        head: names of the parts of the model that are the head, such as ["last"]; or
            a function of a path, such as "last/weight".
        tuning_steps: number of steps of the fine-tuning, an array over clients, or
            ``Epochs``.
        tuning_rate: optimizer of the fine-tuning, a number for plain steps; None for
            that of ``work``.
        tuned: "model" to fine-tune body and head, "head" for the head alone.
    """
    is_head = PATHS("fedbabu: head", head)

    def fixed(path, leaf):
        return leaf if is_head(path) else jax.lax.stop_gradient(leaf)

    of_head = of(lambda params: trees.map_with_path(fixed, params), loss)

    tuning = work._replace(steps=tuning_steps)
    if tuning_rate is not None:
        tuning = tuning._replace(optimizer=tuning_rate)
    trained = partial(loss, work, personal=is_head, personal_steps=0)
    return finetune(trained, loss if tuned == "model" else of_head, tuning)
