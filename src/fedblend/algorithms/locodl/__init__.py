# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""LoCoDL: local steps and compressed messages that end at the exact optimum.

The problem, with g a function that the server has::

    min over shared of  1/n sum_i f_i(shared) + g(shared)

Clients have models x_i and duals u_i, g has a model y that everyone knows and a dual v;
duals are 0 at first, and ``1/n sum u_i + v`` stays 0. All take a step, and one coin for
all says what follows, with unbiased compressors C_i of variance omega::

    xhat_i <- x_i - rate (grad f_i(x_i) - u_i)
    yhat   <- y - rate (grad g(y) - v)
    with probability p       d_i <- C_i(xhat_i - yhat),  d <- 1/2n sum_j d_j
                             x_i <- (1 - rho) xhat_i + rho (yhat + d)
                             y   <- yhat + rho d
                             u_i <- u_i + eta (d - d_i),  v <- v + eta d
    with probability 1 - p   x_i <- xhat_i,  y <- yhat

    rho = 1/(1 + omega_av),  eta = p rho/(rate (1 + 2 omega))

omega_av is that of the mean of all d_i: omega/n with masks of each client's own. A
round is one communication, and the geometric(p) steps before it; the server tosses, as
in ``scaffnew``, and sends y. A client settles x_i, u_i and v when it receives the next
y, as ``rho d = y - yhat`` and it knows yhat.

What g is. Without a central loss, ``moved/2 |x|^2`` moves from every f_i to g: clients
take the steps of y themselves. If more moves than f_i are convex, the method diverges;
``theory.local_training`` says what may move where they are not strongly convex. With a
central loss, g is ``w_c/w_f f_c``, on the server's rows or a function of the
parameters, as in ``mixed_fl``; the server takes the steps of y, and sends yhat beside
y. Inside ``flix`` all f_i are at mixtures: a central loss, local steps, compression and
personal models, converging exactly.

``masks="one"``: all clients keep the same random entries, whose seed the server sends.
Then d is as sparse as d_i, and the server sends its entries instead of y. Now omega_av
is omega, and ``1 + omega`` takes the place of ``1 + 2 omega``.

Where this differs from the paper: communications are given, not steps; 1/p is whole;
steps may be of minibatches. The server's loss as g, and one mask for all, are ours.
A lost answer is never made up for, unlike in ``scaffnew`` and ``scafflix``: the mean of
the duals is not 0 again, and with one mask the client goes on from a wrong y. All
answers have to arrive; a federation on nodes stops where one is missing.

Reference: Condat, Maranjyan, Richtárik, "LoCoDL: communication-efficient distributed
learning with local training and compression", ICLR 2025, arXiv:2403.04348.
"""

from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.locodl import client as client_half
from fedblend.algorithms.locodl import server as server_half
from fedblend.algorithms.locodl.settings import Settings
from fedblend.checks import (
    COUNT,
    FUNCTION,
    NOT_NEGATIVE,
    POSITIVE,
    ByClient,
    by_client,
    gate,
    optional,
    words,
)
from fedblend.compress.compressor import COMPRESSOR, Compressor
from fedblend.core import Algorithm, Loss, Needs
from fedblend.errors import UserError
from fedblend.local import WORK, Work, require_constant_rate
from fedblend.registry import NewClient, algorithm
from fedblend.theory import local_training as theory
from fedblend.transforms.mixed_fl.central_loss import Central, weighted

HALVES = 0.5, 0.5


@algorithm(
    theory=theory.locodl,
    coin=True,
    encodes=True,
    everyone=True,
    new_client=NewClient(build=fedavg),
)
@gate(
    **WORK,
    compressor=COMPRESSOR,
    clients=COUNT,
    moved=optional(NOT_NEGATIVE),
    convex=optional(by_client(NOT_NEGATIVE)),
    masks=words("own", "one"),
)
def locodl(
    loss: Loss,
    work: Work,
    *,
    compressor: Compressor,
    clients: int,
    moved: float | None = None,
    convex: ByClient | None = None,
    masks: str = "own",
    central: Central | None = None,
    weights: tuple[float, float] | None = None,
) -> Algorithm:
    """Local steps with duals and compressed differences, by a common coin.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the constant rate of the local steps; the mean number of local steps in a
            round, the same for all clients; the rows of a step.
        compressor: unbiased compressor of every client's difference.
        clients: n, the number of clients.
        moved: ``moved/2 |x|^2`` is subtracted from every f_i and added to g; None for
            0 with a central loss, else for half of the smallest convexity of f_i, or
            where that is 0 or unknown, ``theory.local_training.stable_moved``.
        convex: mu_i of the f_i, for ``moved``; a number, or an array over clients; None
            where they are unknown.
        masks: "own" for entries of each client's own; "one" for the same of all, with
            ``rand_k`` only.
        central: gradient of the server's loss, from ``central_loss``.
        weights: w_f and w_c, of the clients' and the server's loss; they sum to 1. None
            for a half each. Only with ``central``.
    """
    require_constant_rate("locodl: work", work)
    rate = POSITIVE("locodl: work: optimizer", work.optimizer)
    p, one = 1 / COUNT("locodl: work: steps", work.steps), masks == "one"
    if compressor.omega is None or (one and not compressor.masks):
        allowed = "rand_k, for one mask" if one else "an unbiased compressor"
        raise UserError("locodl: compressor", compressor, allowed, compressor.name)
    if central is None and moved == 0:
        allowed = "above 0, as a problem without a central loss needs"
        raise UserError("locodl: moved", moved, allowed)
    if central is None and weights is not None:
        allowed = "left out where there is no central loss, whose weight it has"
        raise UserError("locodl: weights", weights, allowed)
    if central is not None:
        central = weighted(FUNCTION("locodl: central", central), weights or HALVES)
    settings = Settings(
        loss, work, rate, p, compressor, clients, moved, convex, masks, central
    )
    needs = Needs(
        everyone=True,
        mean=True,
        uniform=True,
        weights="uniform",
        whole=one,
        clients=clients,
    )
    return Algorithm(
        **client_half.functions(settings),
        **server_half.functions(settings),
        needs=needs,
    )
