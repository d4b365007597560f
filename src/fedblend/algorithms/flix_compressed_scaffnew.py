# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""CompressedScaffnew on FLIX: local steps, a part of the entries, personal mixtures.

The problem is that of ``flix``, with x_i* the client's own minimizer of f_i::

    min over shared of  1/n sum_i f_i(alpha_i shared + (1 - alpha_i) x_i*)

``compressed_scaffnew`` solves it on the clients' losses at their mixtures, whose
smoothness is ``alpha_i^2 L_i``. With alpha = 1 it is CompressedScaffnew from the mean
of all x_i*; with ``copies = n``, Scafflix with equal ``alpha_i^2/gamma_i``.

Where this differs from the paper: it is on the objective of FLIX, which is ours.

Reference: Condat, Agarský, Richtárik, "CompressedScaffnew: the first theoretical double
acceleration of communication from local training and compression in distributed
optimization", Optimization, 2026, arXiv:2210.13277.
"""

from functools import partial
from typing import Any

from fedblend import mixing
from fedblend.algorithms.compressed_scaffnew import compressed_scaffnew
from fedblend.algorithms.flix import flix
from fedblend.checks import ALPHA, COUNT, POSITIVE, ByClient, Number, by_client, gate
from fedblend.core import Algorithm, Loss
from fedblend.local import WORK, Work
from fedblend.mixing import MIXING, Mixing
from fedblend.registry import OWN_MODEL, SOLVES, algorithm
from fedblend.solvers import SOLVER, Solver
from fedblend.theory import local_training as theory


@algorithm(
    sends=("update", OWN_MODEL),
    new_client=SOLVES,
    theory=theory.compressed_scaffnew,
    coin=True,
    encodes=True,
    everyone=True,
)
@gate(
    **WORK,
    alpha=ALPHA,
    mix=MIXING,
    personal=SOLVER,
    clients=COUNT,
    copies=Number(whole=True, least=2),
    smooth=by_client(POSITIVE),
)
def flix_compressed_scaffnew(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    clients: int,
    copies: int,
    smooth: ByClient | None = None,
) -> Algorithm:
    """CompressedScaffnew on the mixtures of the shared model and each client's own.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: the constant rate of the local steps; the mean number of local steps in a
            round, the same for all clients; the rows of a step.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``.
        personal: how x_i* is found, from ``fedblend.solvers``.
        clients: n, the number of clients.
        copies: s, how many clients send each entry, from 2 to n.
        smooth: L_i, for the weights of x_avg; None where they are unknown.
    """
    method = partial(compressed_scaffnew, work=work, clients=clients, copies=copies)
    known: Any = 1.0 if smooth is None else smooth
    made = flix(loss, method, alpha=alpha, local=personal, smooth=known, mix=mix)
    # Where x_avg arrives with an error, the controls never sum to 0.
    return made._replace(needs=made.needs._replace(exact="flix_locodl"))
