# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL: minimize a federated loss and a loss at the server together.

Minimizes ``w_f f_f(x) + w_c f_c(x)``: f_f is what the wrapped algorithm minimizes over
the clients, f_c is at the server. Three algorithms, a module each::

    parallel  clients and server train from the same model, and both moves add up
    one_way   the server's gradient is added to every step of the clients
    two_way   both train, each with the gradient of the other of the round before

They share one step, ``step``: central steps and the merge of both models.

Where this differs from the paper: the weights of clients are those of the run, in the
paper the number of examples that a client processes in the round. Each module has the
rest.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655.
"""

from fedblend.checks import ALGORITHM, COUNT, FLAG, FUNCTION, gate, optional, words
from fedblend.compress.compressor import Compressor
from fedblend.core import Algorithm
from fedblend.local import OPTIMIZER, Optimizer
from fedblend.registry import transform
from fedblend.transforms.mixed_fl.central_loss import Central, weighted
from fedblend.transforms.mixed_fl.one_way import one_way
from fedblend.transforms.mixed_fl.parallel import parallel
from fedblend.transforms.mixed_fl.step import Merge, Settings
from fedblend.transforms.mixed_fl.two_way import two_way

HOW = {"parallel": parallel, "one_way": one_way, "two_way": two_way}


@transform()
@gate(
    algorithm=ALGORITHM,
    central=FUNCTION,
    how=words(*HOW),
    steps=COUNT,
    optimizer=optional(OPTIMIZER),
    merge_optimizer=OPTIMIZER,
    upload=FLAG,
)
def mixed_fl(
    algorithm: Algorithm,
    central: Central,
    *,
    how: str,
    weights: tuple[float, float] = (0.5, 0.5),
    steps: int = 1,
    optimizer: Optimizer | None = None,
    merge: Merge | None = None,
    merge_optimizer: Optimizer = 1.0,
    upload: bool = False,
    compressor: Compressor | None = None,
) -> Algorithm:
    """The wrapped algorithm, with a loss at the server beside that of the clients.

    Args:
        algorithm: descends the federated loss, at its own rates.
        central: gradient of the server's loss, from ``central_loss``.
        how: "parallel", "one_way" or "two_way".
        weights: w_f and w_c, which sum to 1.
        steps: number of central steps of a round; one_way takes none.
        optimizer: optimizer of the central steps, started anew every round; None for
            plain steps that go as far as those of the clients. Not for one_way.
        merge: "sum", "average" or the factors (a_f, a_c) of the moves of clients and
            server; None for "sum" with parallel, "average" with two_way. Not for
            one_way.
        merge_optimizer: optimizer that takes the merged move as its gradient and keeps
            its state. Not for one_way.
        upload: clients send their mean gradient, which the server averages with the
            clients' weights, and not by steps where these differ. For two_way only.
        compressor: compressor of the gradient that the server sends (one_way, two_way).
    """
    settings = Settings(
        weights, steps, optimizer, merge, merge_optimizer, upload, compressor
    )
    return HOW[how](algorithm, weighted(central, weights), settings)
