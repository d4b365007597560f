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

from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.scaffnew import toss
from fedblend.batch_statistics import refuse_statistics
from fedblend.checks import (
    COUNT,
    FUNCTION,
    NOT_NEGATIVE,
    POSITIVE,
    ByClient,
    Count,
    each_client,
    optional,
    words,
)
from fedblend.compress import sparse
from fedblend.compress.compressor import Compressor, decode, encode
from fedblend.core import Algorithm, Down, Loss, Needs, PyTree, Up, Wire
from fedblend.errors import UserError
from fedblend.local import Work, descend_times, require_constant_rate
from fedblend.losses import gradient
from fedblend.registry import NewClient, algorithm
from fedblend.theory import local_training as theory
from fedblend.theory.local_training import locodl_scales, stable_moved
from fedblend.transforms.central_loss import Central, weigh

HALVES = 0.5, 0.5


class LocodlClient(NamedTuple):
    """What a client keeps: u_i and v; xhat_i, yhat, d_i and the mask of its last round.

    v is with the server where there is a central loss. ``new``: there was no round yet.
    """

    dual: PyTree
    common: PyTree
    reached: PyTree
    target: PyTree
    sent: PyTree
    seed: PyTree
    new: jax.Array


class LocodlServer(NamedTuple):
    """The server: v, yhat of the round that runs, and all local steps so far."""

    dual: PyTree
    target: PyTree
    local: jax.Array


class Sent(NamedTuple):
    """Beside y: local steps; yhat of a central loss; with one mask, seed and change."""

    local: jax.Array
    target: PyTree
    seed: PyTree = ()
    past: PyTree = ()


@algorithm(
    theory=theory.locodl,
    coin=True,
    encodes=True,
    everyone=True,
    new_client=NewClient(build=fedavg),
)
def locodl(
    loss: Loss,
    work: Work,
    *,
    compressor: Compressor,
    clients: Count,
    moved: Annotated[float | None, optional(NOT_NEGATIVE)] = None,
    convex: Annotated[ByClient | None, optional(each_client(NOT_NEGATIVE))] = None,
    masks: Annotated[str, words("own", "one")] = "own",
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
        central = weigh(FUNCTION("locodl: central", central), weights or HALVES)
    alone, known_omega = central is None, compressor.omega
    gradient_at = gradient(loss)

    def scales(tree):
        """The factors rho and eta, and P^2/p^2 of theory, for models like this one."""
        largest = float(np.max(known_omega(trees.size(tree))))
        relaxation, dual = locodl_scales(largest, clients, masks)
        return relaxation, p * dual / rate, dual

    def choose_moved(tree):
        """The value of ``moved``, or the one that is chosen for such models."""
        if moved is not None or central is not None:
            return moved or 0.0
        stable = stable_moved(rate, p, scales(tree)[2])
        least = jnp.min(jnp.asarray(0.0 if convex is None else convex))
        return jnp.where(least > 0, least / 2, stable)

    def fix_mask(seed):
        """The compressor of a round, whose mask may be that of a seed."""
        return sparse.fix_places(compressor, seed) if one else compressor

    def drift(y, v, local, rows, key):
        """The model yhat, after so many steps on g from y."""
        factor = choose_moved(y)

        def step(number, y):
            push = trees.subtract(trees.scale(factor, y), v)
            if central is not None:
                own = jax.random.fold_in(key, number)
                push = trees.add(push, central(y, rows, own))
            return trees.subtract(y, trees.scale(rate, push))

        return jax.lax.fori_loop(0, local, step, y)

    def slope(params, batch):
        return trees.subtract(
            gradient_at(params, batch), trees.scale(choose_moved(params), params)
        )

    def enroll(params, shard, key):
        refuse_statistics("locodl", params)
        zeros, new = trees.zeros_like(params), jnp.ones((), bool)
        seed = jnp.zeros(2, jnp.uint32) if one else ()
        common = zeros if alone else ()
        return (), LocodlClient(zeros, common, params, params, zeros, seed, new)

    def receive(down, client):
        """The shared model y, also from the entries that changed."""
        if not isinstance(down.shared, sparse.Told):
            return down.shared
        return sparse.receive_change(
            compressor, down.shared, client.target, client.seed
        )

    def settle(y, client):
        """The models x_i, u_i and v after the communication of which y tells."""
        rho, eta, _ = scales(y)
        d = trees.scale(1 / rho, trees.subtract(y, client.target))
        ahead = trees.subtract(client.reached, client.target)
        x = trees.add(y, trees.scale(1 - rho, ahead))
        dual = trees.add(client.dual, trees.scale(eta, trees.subtract(d, client.sent)))
        common = trees.add(client.common, trees.scale(eta, d)) if alone else ()
        before = (y, client.dual, client.common)
        return trees.select(client.new, before, (x, dual, common))

    def client(down, client, shard, key):
        y, sent = receive(down, client), down.extra["locodl"]
        x, dual, common = settle(y, client)
        push = trees.add_where_given(trees.scale(-1, dual), down.correction)
        train = partial(descend_times, slope, work=work)
        reached, mean = train(x, shard, key, times=sent.local, correction=push)
        target = sent.target
        if alone:
            target = drift(y, common, sent.local, None, key)
        own, gap = fix_mask(sent.seed), trees.subtract(reached, target)
        encoded = encode(own, gap, key, shard, "locodl")
        known = decode(own, encoded, key, "locodl", shard.id)
        new = jnp.zeros((), bool)
        after = LocodlClient(dual, common, reached, target, known, sent.seed, new)
        return Up(encoded, mean), after

    def undo(up, sender):
        own = fix_mask(sender.down.extra["locodl"].seed)
        delta = decode(own, up.delta, sender.key, "locodl", sender.id)
        return up._replace(delta=delta)

    def begin(down, server, past, rows, key):
        """The message of the next round, and the server's state in it."""
        local, steps = toss(key, p), keys.named(key, "central")
        target = drift(down.shared, server.dual, local, rows, steps)
        sent = Sent(local, () if alone else target)
        if one:
            sent = sent._replace(seed=sparse.seed_of(key), past=past)
        return down._replace(extra={"locodl": sent}), server._replace(target=target)

    def start(params, joins, central, key):
        none = jnp.zeros((), jnp.int32)
        server = LocodlServer(trees.zeros_like(params), params, none)
        past = sparse.first_change(params)
        return begin(Down(params, none), server, past, central, key)

    def server(aggregate, down, server, central, key):
        sent, d = down.extra["locodl"], trees.scale(0.5, aggregate.mean.delta)
        rho, eta, _ = scales(d)
        change, dual = trees.scale(rho, d), trees.add(server.dual, trees.scale(eta, d))
        past = sparse.note_change(change, sent.seed) if one else ()
        down = down._replace(shared=trees.add(server.target, change))
        after = LocodlServer(dual, server.target, server.local + sent.local)
        return begin(down, after, past, central, key)

    def tell(down, request):
        if not one:
            return down
        sent = down.extra["locodl"]
        shared = sparse.tell_change(compressor, down.shared, sent.past)
        return down._replace(shared=shared, extra={"locodl": sent._replace(past=())})

    made = Algorithm(
        enroll,
        start,
        client,
        server,
        wire=Wire(tell=tell, decode=undo),
        needs=Needs(
            everyone=True,
            mean=True,
            uniform=True,
            weights="uniform",
            whole=one,
            clients=clients,
        ),
    )
    if not one:
        return made
    return made._replace(
        personal=lambda down, client, shard, key: receive(down, client)
    )
