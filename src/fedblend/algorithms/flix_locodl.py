# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""LoCoDL on FLIX: local steps, compressed messages and personal mixtures, exactly.

The problem is that of ``flix``, with x_i* the client's own minimizer of f_i::

    min over shared of  1/n sum_i f_i(alpha_i shared + (1 - alpha_i) x_i*)

``locodl`` solves it on the clients' losses at their mixtures, whose convexity is
``alpha_i^2 mu_i``; half of the smallest of these is ``moved``. With alpha = 1 it is
LoCoDL from the mean of all x_i*.

Where this differs from the paper: it is on the objective of FLIX, which is ours.

Reference: Condat, Maranjyan, Richtárik, "LoCoDL: communication-efficient distributed
learning with local training and compression", ICLR 2025, arXiv:2403.04348.
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from fedblend import mixing
from fedblend.algorithms.flix import flix
from fedblend.algorithms.locodl import locodl
from fedblend.checks import (
    ALPHA,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    ByClient,
    by_client,
    gate,
    optional,
    words,
)
from fedblend.compress.compressor import COMPRESSOR, Compressor
from fedblend.core import Algorithm, Loss
from fedblend.local import WORK, Work
from fedblend.mixing import MIXING, Mixing
from fedblend.registry import OWN_MODEL, SOLVES, algorithm
from fedblend.solvers import SOLVER, Solver
from fedblend.theory import local_training as theory


@algorithm(
    sends=("update", OWN_MODEL),
    new_client=SOLVES,
    theory=theory.locodl,
    coin=True,
    encodes=True,
    everyone=True,
)
@gate(
    **WORK,
    alpha=ALPHA,
    mix=MIXING,
    personal=SOLVER,
    compressor=COMPRESSOR,
    clients=COUNT,
    moved=optional(POSITIVE),
    masks=words("own", "one"),
    smooth=by_client(POSITIVE),
    convex=optional(by_client(NOT_NEGATIVE)),
)
def flix_locodl(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    compressor: Compressor,
    clients: int,
    moved: float | None = None,
    masks: str = "own",
    smooth: ByClient | None = None,
    convex: ByClient | None = None,
) -> Algorithm:
    """LoCoDL on the mixtures of the shared model and each client's own.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: the constant rate of the local steps; the mean number of local steps in a
            round, the same for all clients; the rows of a step.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``.
        personal: how x_i* is found, from ``fedblend.solvers``.
        compressor: unbiased compressor of every client's difference.
        clients: n, the number of clients.
        moved: see ``locodl``; None for half of the smallest ``alpha_i^2 mu_i``, if that
            is known and above 0.
        masks: see ``locodl``.
        smooth: L_i, for the weights of x_avg; None where they are unknown.
        convex: mu_i, for ``moved``; likewise.
    """
    mixed = None if convex is None else _array(alpha) ** 2 * _array(convex)
    method = partial(
        locodl,
        work=work,
        compressor=compressor,
        clients=clients,
        moved=moved,
        convex=mixed,
        masks=masks,
    )
    known: Any = 1.0 if smooth is None else smooth
    return flix(loss, method, alpha=alpha, local=personal, smooth=known, mix=mix)


def _array(value: ByClient) -> np.ndarray | jax.Array:
    """The numbers as JAX would round them, in NumPy.

    Reading a configuration builds the algorithm, and must not start JAX's devices.
    """
    if isinstance(value, jax.Array):
        return value
    return np.asarray(value, jax.dtypes.canonicalize_dtype(float))
