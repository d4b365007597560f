# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partial personalization under the names of its papers: which part stays, which order.

Weights are uniform unless
the run sets others; FedPer and LG-FedAvg weigh clients by their rows in their papers.
"""

from typing import Annotated

import jax

from fedblend import trees
from fedblend.algorithms.finetune import finetune
from fedblend.algorithms.partial import partial
from fedblend.checks import PATHS, PartNames, optional, words
from fedblend.core import Algorithm, Loss
from fedblend.local import OPTIMIZER, Optimizer, Steps, Work
from fedblend.losses import compose
from fedblend.registry import STEP_BY_STEP, NewClient, algorithm


@algorithm(keeps="head", new_client=STEP_BY_STEP, preset_of="partial")
def fedper(loss: Loss, work: Work, *, head: PartNames) -> Algorithm:
    """FedPer: a shared body and personal heads, trained together.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round, on body and head.
        head: names of the parts of the model that stay, such as ["last"]; or a function
            of a path, such as "last/weight".

    Reference: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with
    personalization layers", 2019, arXiv:1912.00818.
    """
    return partial(loss, work, personal=head, order="together")


@algorithm(keeps="body", new_client=STEP_BY_STEP, preset_of="partial")
def lg_fedavg(loss: Loss, work: Work, *, body: PartNames) -> Algorithm:
    """LG-FedAvg: personal bodies under a shared head, trained together.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round, on body and head.
        body: names of the parts of the model that stay, such as ["hidden"]; or a
            function of a path, such as "hidden/0/weight".

    Reference: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think
    locally, act globally: federated learning with local and global representations",
    2020, arXiv:2001.01523.
    """
    return partial(loss, work, personal=body, order="together")


@algorithm(keeps="normalization", new_client=STEP_BY_STEP, preset_of="partial")
def fedbn(loss: Loss, work: Work, *, normalization: PartNames) -> Algorithm:
    """FedBN: all but the normalization layers is shared.

    Where this differs from the paper: it does not, with batch normalization, whose
    scale, offset and running statistics stay. Of a layer or group normalization the
    scale and the offset do.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round, on all parameters.
        normalization: names of the normalization layers, which stay, such as ["norm"];
            or a function of a path, such as "norm/scale".

    Reference: Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID
    features via local batch normalization", ICLR 2021, arXiv:2102.07623.
    """
    return partial(loss, work, personal=normalization, order="together")


@algorithm(keeps="biases", new_client=STEP_BY_STEP, preset_of="partial")
def bitfit(loss: Loss, work: Work, *, biases: PartNames) -> Algorithm:
    """BitFit as a personal part: all but the biases is shared.

    Where this differs from the paper: that one trains biases alone, of a model that was
    trained before. Here the rest is trained too, by all clients.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round, on all parameters.
        biases: names of the biases, which stay, such as ["last/bias"]; or a function of
            a path.

    Reference: Ben Zaken, Ravfogel, Goldberg, "BitFit: simple parameter-efficient fine-
    tuning for transformer-based masked language-models", ACL 2022, arXiv:2106.10199.
    """
    return partial(loss, work, personal=biases, order="together")


@algorithm(
    keeps="personal", new_client=NewClient(steps="personal_steps"), preset_of="partial"
)
def fedalt(
    loss: Loss,
    work: Work,
    *,
    personal: PartNames,
    personal_steps: Steps,
    personal_rate: Annotated[Optimizer | None, optional(OPTIMIZER)] = None,
) -> Algorithm:
    """FedAlt: any personal part, trained before the shared one in every round.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work on the shared part; its batch size also serves the personal.
        personal: names of the parts of the model that stay, such as ["last"]; or a
            function of a path, such as "last/weight".
        personal_steps: number of steps on the personal part in a round, an array over
            clients, or ``Epochs``.
        personal_rate: optimizer of the personal part, a number for plain steps; None
            for that of ``work``.

    Reference: Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "Federated learning with
    partial model personalization", ICML 2022, arXiv:2204.03809.
    """
    own = {"personal_steps": personal_steps, "personal_rate": personal_rate}
    return partial(loss, work, personal=personal, order="alternate", **own)


@algorithm(keeps="personal", new_client=STEP_BY_STEP, preset_of="partial")
def fedsim(
    loss: Loss,
    work: Work,
    *,
    personal: PartNames,
    personal_rate: Annotated[Optimizer | None, optional(OPTIMIZER)] = None,
) -> Algorithm:
    """FedSim: any personal part, trained together with the shared one.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round, on both parts.
        personal: names of the parts of the model that stay, such as ["last"]; or a
            function of a path, such as "last/weight".
        personal_rate: optimizer of the personal part, a number for plain steps; None
            for that of ``work``.

    Reference: Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "Federated learning with
    partial model personalization", ICML 2022, arXiv:2204.03809.
    """
    own = {"order": "together", "personal_rate": personal_rate}
    return partial(loss, work, personal=personal, **own)


@algorithm(keeps="head", new_client=NewClient(steps="head_steps"), preset_of="partial")
def fedrep(loss: Loss, work: Work, *, head: PartNames, head_steps: Steps) -> Algorithm:
    """FedRep: a shared body, and a head that stays with each client.

    The problem is ``min over body, head_1 .. head_n of 1/n sum_i f_i(body, head_i)``,
    body and head being two parts of the parameters. A round, for every client i of the
    cohort::

        head_i <- head_steps times:
                  head_i <- head_i - rate * grad_head f_i(body, head_i)
        b_i    <- body, then steps times:
                  b_i <- b_i - rate * grad_body f_i(b_i, head_i)
        body   <- body + mean (b_i - body)

        personal_i = body with head_i

    Only the body travels, in both directions, and only it is counted: where the head
    is, a message has None. Where everything is body it is FedAvg, where everything is
    head it is training alone. ``shared`` has the head that everybody began with: no
    model to use.

    It is ``partial`` with the head personal, which alternates.

    Where this differs from the paper: it does not, with plain SGD; its analysis takes
    exact minima for heads. A client that never took part still has the initial head.

    Reference: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared
    representations for personalized federated learning", ICML 2021, arXiv:2102.07078.

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
        >>> algorithm = fb.algorithms.fedrep(
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


@algorithm(
    keeps="head",
    new_client=NewClient(visits=0, steps="tuning_steps"),
    preset_of="partial",
    trains_kept=False,
)
def fedbabu(
    loss: Loss,
    work: Work,
    *,
    head: PartNames,
    tuning_steps: Steps,
    tuning_rate: Annotated[Optimizer | None, optional(OPTIMIZER)] = None,
    tuned: Annotated[str, words("model", "head")] = "model",
) -> Algorithm:
    """FedBABU: a shared body is trained under a head that never moves, then fine-tuned.

    Everybody has the same head, the initial one. A round, for every client i of the
    cohort::

        b_i  <- body, then steps times:  b_i <- b_i - rate * grad_body f_i(b_i, head)
        body <- body + mean (b_i - body)

        personal_i = (body, head) after tuning_steps steps on f_i

    Only the body travels. It is ``partial`` with the head personal and no steps on it,
    and fine-tuning when a client deploys its model. ``shared`` is the body with the
    initial head, the paper's global model.

    Where this differs from the paper: it compares fine-tuning of the whole model, of
    the head and of the body, and ``tuned`` has the first two. Weights are uniform
    unless the run sets others. With ``tuned="head"`` an optimizer that decays weights
    moves the body too.

    Reference: Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated
    image classification", ICLR 2022, arXiv:2106.06042.

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

    def fix(path, leaf):
        return leaf if is_head(path) else jax.lax.stop_gradient(leaf)

    of_head = compose(lambda params: trees.map_with_path(fix, params), loss)

    tuning = work._replace(steps=tuning_steps)
    if tuning_rate is not None:
        tuning = tuning._replace(optimizer=tuning_rate)
    trained = partial(loss, work, personal=is_head, personal_steps=0)
    return finetune(trained, loss if tuned == "model" else of_head, tuning)
