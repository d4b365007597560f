# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partial personalization under the names of its papers: which part stays, which order.

FedRep and FedBABU have more to say, and files of their own. Weights are uniform unless
the run sets others; FedPer and LG-FedAvg weigh clients by their rows in their papers.
"""

from fedblend.algorithms.partial import Paths, partial
from fedblend.checks import PATHS, gate, optional
from fedblend.core import Algorithm, Loss
from fedblend.local import OPTIMIZER, STEPS, WORK, Optimizer, Steps, Work
from fedblend.registry import STEP_BY_STEP, NewClient, algorithm


@algorithm(keeps="head", new_client=STEP_BY_STEP, preset_of="partial")
@gate(**WORK, head=PATHS)
def fedper(loss: Loss, work: Work, *, head: Paths) -> Algorithm:
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
@gate(**WORK, body=PATHS)
def lg_fedavg(loss: Loss, work: Work, *, body: Paths) -> Algorithm:
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
@gate(**WORK, normalization=PATHS)
def fedbn(loss: Loss, work: Work, *, normalization: Paths) -> Algorithm:
    """FedBN: all but the normalization layers is shared.

    Where this differs from the paper: models here have no batch statistics. What stays
    is the scale and the offset of a layer or group normalization, or of a batch
    normalization whose statistics are constants (``freeze_batch_norm``).

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
@gate(**WORK, biases=PATHS)
def bitfit(loss: Loss, work: Work, *, biases: Paths) -> Algorithm:
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
@gate(**WORK, personal=PATHS, personal_steps=STEPS, personal_rate=optional(OPTIMIZER))
def fedalt(
    loss: Loss,
    work: Work,
    *,
    personal: Paths,
    personal_steps: Steps,
    personal_rate: Optimizer | None = None,
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
@gate(**WORK, personal=PATHS, personal_rate=optional(OPTIMIZER))
def fedsim(
    loss: Loss,
    work: Work,
    *,
    personal: Paths,
    personal_rate: Optimizer | None = None,
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


@algorithm(new_client=STEP_BY_STEP, form="factors", preset_of="partial")
@gate(**WORK)
def fedsa_lora(loss: Loss, work: Work) -> Algorithm:
    """FedSA-LoRA: of the factors of an adapter every A is shared, every B stays.

    Both are trained together. A client's change is B_i times the mean of A: there is no
    mean of B, so that no product of means stands for a mean of products.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``, of a model with ``lora`` adapters.
        work: local work of a round, on both factors.

    Reference: Guo, Zeng, Wang, Fan, Wang, Qu, "Selective aggregation for low-rank
    adaptation in federated learning", ICLR 2025, arXiv:2410.01463.
    """
    stays = PATHS("fedsa_lora: params", ["*/b"])
    return partial(loss, work, personal=stays, order="together")


@algorithm(form="factors", preset_of="partial", trains_kept=False)
@gate(**WORK)
def ffa_lora(loss: Loss, work: Work) -> Algorithm:
    """FFA-LoRA: of the factors of an adapter every B is shared, no A is ever trained.

    All clients have the A of the initial parameters, so that the mean of B gives the
    mean of the products. ``lora(rank, train="b")`` under ``fedavg`` is the same method
    with the same weights of clients; its A is no parameter, and takes less memory.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``, of a model with ``lora`` adapters.
        work: local work of a round, on every B.

    Reference: Sun, Li, Li, Ding, "Improving LoRA in privacy-preserving federated
    learning", ICLR 2024, arXiv:2403.12313.
    """
    frozen = PATHS("ffa_lora: params", ["*/a"])
    return partial(loss, work, personal=frozen, personal_steps=0)
