# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX by compressed local training: LoCoDL and CompressedScaffnew on mixtures."""

from functools import partial
from typing import Annotated, Any

import jax
import numpy as np

from fedblend import mixing
from fedblend.algorithms.compressed_scaffnew import compressed_scaffnew
from fedblend.algorithms.flix import flix
from fedblend.algorithms.locodl import locodl
from fedblend.checks import (
    NOT_NEGATIVE,
    POSITIVE,
    Alpha,
    ByClient,
    Count,
    Number,
    each_client,
    optional,
    words,
)
from fedblend.compress.compressor import Compressor
from fedblend.core import Algorithm, Loss
from fedblend.local import Work
from fedblend.mixing import Mixing
from fedblend.registry import OWN_MODEL, SOLVES, algorithm
from fedblend.solvers import Solver
from fedblend.theory import local_training as theory


@algorithm(
    sends=("update", OWN_MODEL),
    new_client=SOLVES,
    theory=theory.locodl,
    coin=True,
    encodes=True,
    everyone=True,
)
def flix_locodl(
    loss: Loss,
    work: Work,
    *,
    alpha: Alpha,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    compressor: Compressor,
    clients: Count,
    moved: Annotated[float | None, optional(POSITIVE)] = None,
    masks: Annotated[str, words("own", "one")] = "own",
    smooth: Annotated[ByClient | None, each_client(POSITIVE)] = None,
    convex: Annotated[ByClient | None, optional(each_client(NOT_NEGATIVE))] = None,
) -> Algorithm:
    """LoCoDL on FLIX: local steps, compressed messages and personal mixtures, exactly.

    The problem is that of ``flix``, with x_i* the client's own minimizer of f_i::

        min over shared of  1/n sum_i f_i(alpha_i shared + (1 - alpha_i) x_i*)

    ``locodl`` solves it on the clients' losses at their mixtures, whose convexity is
    ``alpha_i^2 mu_i``; half of the smallest of these is ``moved``. With alpha = 1 it is
    LoCoDL from the mean of all x_i*.

    Where this differs from the paper: it is on the objective of FLIX, which is ours.

    Reference: Condat, Maranjyan, Richtárik, "LoCoDL: communication-efficient
    distributed learning with local training and compression", ICLR 2025,
    arXiv:2403.04348.

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


@algorithm(
    sends=("update", OWN_MODEL),
    new_client=SOLVES,
    theory=theory.compressed_scaffnew,
    coin=True,
    encodes=True,
    everyone=True,
)
def flix_compressed_scaffnew(
    loss: Loss,
    work: Work,
    *,
    alpha: Alpha,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    clients: Count,
    copies: Annotated[int, Number(whole=True, least=2)],
    smooth: Annotated[ByClient | None, each_client(POSITIVE)] = None,
) -> Algorithm:
    """CompressedScaffnew on FLIX: local steps, some of the entries, personal mixtures.

    The problem is that of ``flix``, with x_i* the client's own minimizer of f_i::

        min over shared of  1/n sum_i f_i(alpha_i shared + (1 - alpha_i) x_i*)

    ``compressed_scaffnew`` solves it on the clients' losses at their mixtures, whose
    smoothness is ``alpha_i^2 L_i``. With alpha = 1 it is CompressedScaffnew from the
    mean of all x_i*; with ``copies = n``, Scafflix with equal ``alpha_i^2/gamma_i``.

    Where this differs from the paper: it is on the objective of FLIX, which is ours.

    Reference: Condat, Agarský, Richtárik, "CompressedScaffnew: the first theoretical
    double acceleration of communication from local training and compression in
    distributed optimization", Optimization, 2026, arXiv:2210.13277.

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
