# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods for factors of low rank that are settings of ``partial``."""

from fedblend.algorithms.partial import partial
from fedblend.checks import PATHS
from fedblend.core import Algorithm, Loss
from fedblend.local import Work
from fedblend.registry import STEP_BY_STEP, algorithm


@algorithm(new_client=STEP_BY_STEP, form="factors", preset_of="partial")
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
