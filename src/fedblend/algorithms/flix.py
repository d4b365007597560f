# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX: every client deploys a mixture of the shared and its own local model.

The problem, with x_i a minimizer of f_i that client i finds on its own::

    min over shared of  1/n sum_i f_i(alpha_i shared + (1 - alpha_i) x_i)

is a finite sum like any other, so that any federated algorithm solves it: FLIX wraps
one, given as a function from a loss to an algorithm, and gives it each client's loss at
the mixture. Autodiff writes the factor alpha_i of the gradient. The rounds::

    enrollment   x_i <- pure local model; sends w_i x_i and w_i,  w_i = alpha_i^2 L_i
    start       shared <- x_avg = sum w_i x_i / sum w_i
    rounds      those of the wrapped algorithm
    deployed    alpha_i shared + (1 - alpha_i) x_i

With ``fedopt`` of one full gradient it is distributed gradient descent, the paper's
solver; with a minibatch and any server optimizer what the paper runs on networks; with
more local steps another method, which the authors' code runs under the same name; with
``svrg`` minibatches whose noise dies out; under ``diana`` compressed.

Where this differs from the paper: for its own solvers it does not. Weights are uniform
unless the run sets others; ``average="stationary"`` weighs by alpha_i^4 L_i^2, for x_i
that are stationary points only. A run that reduces by the median, say, takes that of
what clients send at enrollment, too. Wrapped methods with states enroll at the initial
parameters.

Reference: Gasanov, Khaled, Horváth, Richtárik, "FLIX: a simple and communication-
efficient alternative to local methods in federated learning", AISTATS 2022,
arXiv:2111.11556.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedblend import keys, mixing, trees
from fedblend.algorithms.compressed_scaffnew import compressed_scaffnew
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.fedopt import fedopt
from fedblend.algorithms.locodl import locodl
from fedblend.batches import per_client
from fedblend.checks import (
    ALPHA,
    COUNT,
    FUNCTION,
    NOT_NEGATIVE,
    POSITIVE,
    ByClient,
    Number,
    by_client,
    gate,
    optional,
    words,
)
from fedblend.compress.compressor import COMPRESSOR, Compressor
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.errors import UserError
from fedblend.local import OPTIMIZER, WORK, Work
from fedblend.losses import of
from fedblend.mixing import MIXING, Mixing
from fedblend.registry import OWN_MODEL, SOLVES, algorithm
from fedblend.solvers import SOLVER, Solver
from fedblend.theory import local_training as theory
from fedblend.theory.steps import dgd


class FlixClient(NamedTuple):
    """The state of a client: x_i, its gradient norm, and the wrapped method's state."""

    personal: PyTree
    norm: jax.Array
    inner: PyTree


@gate(
    **dict.fromkeys(("loss", "method"), FUNCTION),
    alpha=ALPHA,
    local=SOLVER,
    mix=MIXING,
    smooth=Number(least=0, clients=True),
    average=words("minimizer", "stationary"),
)
def flix(
    loss: Loss,
    method: Callable[[Loss], Algorithm],
    *,
    alpha: ByClient,
    local: Solver,
    smooth: ByClient = 1.0,
    average: str = "minimizer",
    mix: Mixing = mixing.parameters,
) -> Algorithm:
    """Any algorithm on the mixture of the shared model and each client's own model.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        method: from a loss to the algorithm that solves the shared problem.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        local: how x_i is found, from ``fedblend.solvers``.
        smooth: L_i, for the weights of x_avg; a number, or an array over clients.
        average: weights of x_avg: "minimizer" for alpha_i^2 L_i, "stationary" for
            alpha_i^4 L_i^2.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
    """
    power = 1 if average == "minimizer" else 2

    def own(personal, shard):
        weight = per_client(alpha, shard)
        return method(of(lambda params: mix(weight, params, personal), loss))

    def enroll(params, shard, key):
        personal, norm = local(params, shard, keys.named(key, "local model"))
        join, inner = own(personal, shard).enroll(params, shard, key)
        weight = (per_client(alpha, shard) ** 2 * per_client(smooth, shard)) ** power
        sent = (trees.scale(weight, personal), weight)
        return (join, sent), FlixClient(personal, norm, inner)

    def start(params, joins, central, key):
        join, (total, weight) = joins.mean
        average = trees.scale(1 / jnp.where(weight > 0, weight, 1), total)
        first = trees.select(weight > 0, average, params)
        aggregate = joins._replace(mean=join)
        return method(loss).start(first, aggregate, central, key)

    def client(down, client, shard, key):
        inner = own(client.personal, shard)
        up, state = inner.client(down, client.inner, shard, key)
        return up, client._replace(inner=state)

    def personal(down, client, shard, key):
        return mix(per_client(alpha, shard), down.shared, client.personal)

    inner = method(loss)

    def info(client):
        own = {"local_model": client.personal, "local_model_gradient_norm": client.norm}
        return own | inner.info(client.inner)

    return inner._replace(
        enroll=enroll,
        start=start,
        client=client,
        personal=personal,
        wire=inner.wire._replace(
            ask=lambda client, shard: inner.wire.ask(client.inner, shard)
        ),
        info=info,
        needs=inner.needs._replace(weights="uniform"),
    )


RULES = {
    **WORK,
    "alpha": ALPHA,
    "mix": MIXING,
    "personal": SOLVER,
    "server": optional(OPTIMIZER),
    "smooth": by_client(POSITIVE),
}


@algorithm(sends=("update", OWN_MODEL), new_client=SOLVES)
@gate(**RULES)
def flix_local_steps(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    server: float | optax.GradientTransformation | None = None,
    smooth: ByClient = 1.0,
) -> Algorithm:
    """FLIX with local steps: FedAvg or FedOpt on the mixture, as a configuration states
    it.

    The problem and the mixture are those of ``flix``, which takes any method. A round,
    for every client i of the cohort, with x_i the client's own model::

        y_i    <- shared, then steps times:
                y_i <- y_i - rate * grad in y_i of f_i(alpha_i y_i + (1 - alpha_i) x_i)
        delta  <- mean of y_i - shared
        shared <- shared + delta, or ServerOpt(shared, -delta) with a server optimizer

    With one step, a gradient of all rows or of a batch, it is the paper's method: the
    algorithm ``flix`` of a configuration.

    Where this differs from the paper: several local steps are another method, which the
    authors' code runs under the same name.

    Reference: Gasanov, Khaled, Horváth, Richtárik, "FLIX: a simple and communication-
    efficient alternative to local methods in federated learning", AISTATS 2022,
    arXiv:2111.11556.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: local work of a round on the shared model: optimizer, steps, batch size.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
        personal: how x_i is found, from ``fedblend.solvers``.
        server: optimizer of the server; None for plain averaging.
        smooth: L_i, for the weights of x_avg; a number, or an array over clients.
    """
    method = partial(fedavg, work=work)
    if server is not None:
        method = partial(fedopt, work=work, server_optimizer=server)
    return flix(loss, method, alpha=alpha, local=personal, smooth=smooth, mix=mix)


@algorithm(
    name="flix",
    builder=flix,
    sends=("update", OWN_MODEL),
    new_client=SOLVES,
    theory=dgd,
    # One gradient of all rows per round.
    defaults={"rate": 0.5, "steps": 1, "batch_size": "all"},
)
@gate(**RULES)
def flix_by_gradients(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    server: float | optax.GradientTransformation | None = None,
    smooth: ByClient = 1.0,
) -> Algorithm:
    """FLIX with one gradient of every client in a round.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: optimizer and batch size of the gradient; one step.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
        personal: how x_i is found, from ``fedblend.solvers``.
        server: optimizer of the server; None for plain averaging.
        smooth: L_i, for the weights of x_avg; a number, or an array over clients.
    """
    if np.ndim(work.steps) or work.steps != 1:
        allowed = (
            "1: flix takes one gradient a round; more are the method flix_local_steps"
        )
        raise UserError("flix: work: steps", work.steps, allowed)
    return flix_local_steps(
        loss,
        work,
        alpha=alpha,
        mix=mix,
        personal=personal,
        server=server,
        smooth=smooth,
    )


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
