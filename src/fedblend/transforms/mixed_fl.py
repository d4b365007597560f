# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL: minimize a federated loss and a loss at the server together.

Minimizes ``w_f f_f(x) + w_c f_c(x)``: f_f is what the wrapped algorithm minimizes over
the clients, f_c is at the server. There are three ways, with x the shared model and
``g_c = w_c / w_f grad f_c``. Clients descend f_i and not ``w_f f_i`` as in the paper,
so that rates here are w_f times those of the paper.

"parallel": clients and server train from the same model, and both moves add up. A round
of Algorithm 1 of the paper without augmenting gradients::

    clients  x_f <- a round of the wrapped algorithm from x
    server   x_c <- x, then steps times:  x_c <- x_c - central rate * g_c(x_c)
    merge    x   <- x + (x_f - x) + (x_c - x)

Central steps go as far as the clients do, unless ``optimizer`` is given: the central
rate times ``steps`` is the clients' mean of rate times steps, times the gain of the
wrapped server (``Needs.gain``). Only then, and only with plain steps everywhere, this
minimizes ``w_f f_f + w_c f_c``: a server without a gain, such as Adam, is refused, and
so is clipping around it. With several steps a round x_f and x_c drift apart, and x ends
off the minimizer of the mixture.

"one_way": the server's gradient is added to every step of the clients. A round of
Algorithm 2::

    server   b <- g_c(x), on one batch
    clients  x_i <- x, then steps times:  x_i <- x_i - rate * (grad f_i(x_i) + b)
    server   x <- the wrapped server's step on the mean of x_i - x

"two_way": both train, each with the gradient of the other of the round before. A round
of Algorithm 1, with the augmenting gradients b_c and b_f, zero at first::

    clients  x_i <- x, then steps times:  x_i <- x_i - rate * (grad f_i(x_i) + b_c)
             x_f <- the wrapped server's step on the mean of x_i - x
    server   x_c <- x, then steps times:  x_c <- x_c - central rate * (g_c(x_c) + b_f)
    merge    x   <- x + (x_f - x) / 2 + (x_c - x) / 2
    next     b_c <- the mean of g_c(x_c) over the central steps
             b_f <- the mean of grad f_i(x_i) over the clients' steps
                  = - (mean of x_i - x) / (mean of rate times steps) - b_c      (10)

with the old b_c in (10). Central steps go as far as the clients do, unless
``optimizer`` is given. (10) costs one number beside the model. It holds for plain steps
of one rate only; other clients ``upload`` their mean gradient.

Where this differs from the paper: the weights of clients are those of the run, in the
paper the number of examples that a client processes in the round. Algorithm 1, in the
copy that we have, ends before the merge and before the next b_c, and the text says
"merges (e.g., averages)". In parallel both moves add up, which is the step of the
mixture. In two_way both sides descend the whole loss already, so that their moves are
averaged; b_c is what b_f is at the clients, as in SCAFFOLD, which the paper's proof
reads it as. The paper's (10) has no weights of clients and is wrong where these differ;
here both means have the weights of the aggregation.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655.
"""

import warnings
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import keys, trees
from fedblend.batch_statistics import take_step
from fedblend.checks import (
    Count,
    optional,
    words,
)
from fedblend.compress.compressor import Compressor, decode, encode
from fedblend.core import Aggregate, Algorithm, Down, Key, PyTree, Shard, Up
from fedblend.local import OPTIMIZER, Optimizer, resolve
from fedblend.registry import transform
from fedblend.transforms._compose import delta_of
from fedblend.transforms.central_loss import Central, weigh

MERGES = {"sum": (1.0, 1.0), "average": (0.5, 0.5)}
Merge = str | tuple[float, float]
"""The factors a_f and a_c, or the name of a pair."""


class MixedServer(NamedTuple):
    """The server's state: that of the wrapped algorithm, that of the merge optimizer,
    and the federated gradient that the central steps add.
    """

    inner: PyTree
    merge: PyTree = ()
    federated_gradient: PyTree = ()


class Sent(NamedTuple):
    """What clients send beside their model: rate times steps, and mean gradient."""

    step_sum: PyTree = ()
    mean_gradient: PyTree = ()


@transform()
def mixed_fl(
    algorithm: Algorithm,
    central: Central,
    *,
    how: Annotated[str, words("parallel", "one_way", "two_way")],
    weights: tuple[float, float] = (0.5, 0.5),
    steps: Count = 1,
    optimizer: Annotated[Optimizer | None, optional(OPTIMIZER)] = None,
    merge: Merge | None = None,
    merge_optimizer: Annotated[Optimizer, OPTIMIZER] = 1.0,
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
    g_c = weigh(central, weights)
    if how == "one_way":
        rate = merge_optimizer
        merges = merge is not None or not (isinstance(rate, float) and rate == 1)
        if optimizer is not None or merges:
            raise ValueError(
                "one_way: takes no central steps and merges nothing; optimizer, merge "
                "and merge_optimizer go with parallel and two_way"
            )
        return _encode_correction(_one_way(algorithm, g_c), compressor)
    factors: Merge = "sum" if how == "parallel" else "average"
    factors = factors if merge is None else merge
    if isinstance(factors, str):
        if factors not in MERGES:
            raise ValueError(
                f"merge: {merge!r} is unknown, it is {', '.join(MERGES)} or two numbers"
            )
        factors = MERGES[factors]
    if len(factors) != 2 or min(factors) < 0:
        raise ValueError(f"merge: {merge} are not two numbers, 0 or more")
    merged = Merging(factors, resolve(merge_optimizer, 0, 1))
    if how == "parallel":
        return _parallel(algorithm, g_c, weights, steps, optimizer, merged)
    around = _two_way(algorithm, g_c, steps, optimizer, merged, upload)
    return _encode_correction(around, compressor)


def _parallel(
    algorithm: Algorithm,
    g_c: Central,
    weights: tuple[float, float],
    steps: int,
    optimizer: Optimizer | None,
    merging: "Merging",
) -> Algorithm:
    """The wrapped algorithm, and central training beside it."""
    follows, gain = optimizer is None, algorithm.needs.gain
    if not follows or merging.factors[0] != merging.factors[1]:
        warnings.warn(
            "parallel: central steps or their merging have a rate of their own; unless "
            "rate x steps is that of the clients (times the server's rate), and all "
            "steps are plain and none is clipped, another mixture than "
            f"{tuple(weights)} is minimized",
            stacklevel=4,
        )
    if follows and gain is None:
        raise ValueError(
            "mixed_fl: this server does not move by a known multiple of the "
            "clients' mean step (an optimizer or a schedule), so that parallel would "
            f"minimize another mixture than {tuple(weights)}; use one_way, or "
            "such an optimizer as merge_optimizer over a plain server"
        )

    def send(up):
        wanted = "an optimizer for the central steps"
        return Sent(_step_sum(up, wanted)) if follows else Sent()

    def start(params, joins, rows, key):
        down, inner = algorithm.start(params, joins, rows, key)
        return down, MixedServer(inner, merging.rule.init(down.shared))

    def server(aggregate, down, server, rows, key):
        sent = aggregate.mean.extra["mixed_fl"]
        after, inner = algorithm.server(aggregate, down, server.inner, rows, key)
        rate = sent.step_sum / steps * gain if optimizer is None else optimizer
        rule = resolve(rate, down.round, steps)
        x_c, _ = central_steps(g_c, down.shared, rows, key, rule, steps)
        x, state = merging(down.shared, after.shared, x_c, server.merge)
        return after._replace(shared=x), MixedServer(inner, state)

    length = algorithm.needs.length or follows
    needs = algorithm.needs._replace(length=length, gain=None)
    return _sending(algorithm, send)._replace(start=start, server=server, needs=needs)


def _one_way(algorithm: Algorithm, g_c: Central) -> Algorithm:
    """The wrapped algorithm, whose clients add the central gradient to their own."""

    def augment(down, rows, key):
        b = g_c(down.shared, rows, keys.named(key, "central"))
        return down._replace(correction=b)

    def start(params, joins, rows, key):
        down, inner = algorithm.start(params, joins, rows, key)
        return augment(_require_free(down), rows, key), MixedServer(inner)

    def server(aggregate, down, server, rows, key):
        after, inner = algorithm.server(aggregate, down, server.inner, rows, key)
        return augment(after, rows, key), MixedServer(inner)

    return _sending(algorithm, lambda up: Sent())._replace(start=start, server=server)


def _two_way(
    algorithm: Algorithm,
    g_c: Central,
    steps: int,
    optimizer: Optimizer | None,
    merging: "Merging",
    upload: bool,
) -> Algorithm:
    """The wrapped algorithm and central training, each with the other's gradient."""
    wanted = [] if upload else ["upload=True, since their gradient cannot be recovered"]
    wanted += ["an optimizer for the central steps"] if optimizer is None else []

    def send(up):
        if upload and up.mean_gradient is None:
            raise ValueError(
                "mixed_fl: upload: these clients have no gradient to send (it would go "
                "past their privacy, or they keep it to themselves)"
            )
        return Sent(
            _step_sum(up, " and ".join(wanted)) if wanted else (),
            up.mean_gradient if upload else (),
        )

    def start(params, joins, rows, key):
        down, inner = algorithm.start(params, joins, rows, key)
        zeros = trees.zeros_like(down.shared)
        state = MixedServer(inner, merging.rule.init(down.shared), zeros)
        return _require_free(down)._replace(correction=zeros), state

    def server(aggregate, down, server, rows, key):
        sent = aggregate.mean.extra["mixed_fl"]
        after, inner = algorithm.server(aggregate, down, server.inner, rows, key)
        rate = sent.step_sum / steps if optimizer is None else optimizer
        rule = resolve(rate, down.round, steps)
        b_f = server.federated_gradient
        x_c, b_c = central_steps(g_c, down.shared, rows, key, rule, steps, b_f)
        x, state = merging(down.shared, after.shared, x_c, server.merge)
        b_f = (
            sent.mean_gradient
            if upload
            else _recover_gradient(aggregate, sent, down, b_f)
        )
        # Of parameters that clients keep to themselves they send no gradient.
        b_f = trees.fill(b_f, trees.zeros_like(down.shared))
        return after._replace(shared=x, correction=b_c), MixedServer(inner, state, b_f)

    length = algorithm.needs.length or not upload
    needs = algorithm.needs._replace(mean=True, length=length, gain=None)
    return _sending(algorithm, send)._replace(start=start, server=server, needs=needs)


def central_steps(
    gradient: Central,
    start: PyTree,
    rows: Shard | None,
    key: Key,
    rule: optax.GradientTransformation,
    steps: int,
    added: PyTree | None = None,
) -> tuple[PyTree, PyTree]:
    """The model after the central steps of a round, and the mean gradient on the way.

    Args:
        gradient: g_c.
        start: the model at first.
        rows: of the server.
        key: of the round.
        rule: an optimizer, started here.
        steps: their number.
        added: a tree added to every gradient, though not to their mean.
    """
    own = keys.named(key, "central")

    def step(carry, number):
        here, state, total = carry
        mean_gradient = gradient(here, rows, jax.random.fold_in(own, number))
        push = trees.add_where_given(mean_gradient, added)
        moved, state = take_step(rule, push, state, here, mean_gradient)
        return (moved, state, trees.add(total, mean_gradient)), None

    first = (start, rule.init(start), trees.zeros_like(start))
    (reached, _, total), _ = jax.lax.scan(step, first, jnp.arange(steps))
    return reached, trees.scale(1 / steps, total)


class Merging(NamedTuple):
    """The merge of both models: factors a_f and a_c, and the merge optimizer."""

    factors: tuple[float, float]
    rule: optax.GradientTransformation

    def __call__(
        self, shared: PyTree, federated: PyTree, central: PyTree, state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The next x from x, x_f and x_c, and the next state of the optimizer."""
        move = trees.add(
            trees.scale(self.factors[0], trees.subtract(federated, shared)),
            trees.scale(self.factors[1], trees.subtract(central, shared)),
        )
        push = trees.scale(-1, move)
        return take_step(self.rule, push, state, shared, push, momentum=1.0)


def _sending(algorithm: Algorithm, send: Callable[[Up], Sent]) -> Algorithm:
    """The algorithm whose clients also send ``send(up)``, in ``extra["mixed_fl"]``."""

    def client(down, client, shard, key):
        up, client = algorithm.client(down, client, shard, key)
        delta_of(up, "mixed_fl")
        return up._replace(extra=up.extra | {"mixed_fl": send(up)}), client

    return algorithm._replace(client=client)


def _recover_gradient(
    aggregate: Aggregate, sent: Sent, down: Down, before: PyTree
) -> PyTree:
    """Equation (10): the mean gradient of clients that take plain steps of one rate.

    Args:
        aggregate: with the mean of the clients' moves.
        sent: with the mean of their rate times steps.
        down: with the correction that they added.
        before: the gradient of the round before, for a round in which nobody moved.
    """
    moved = sent.step_sum > 0
    pushed = trees.scale(-1 / jnp.where(moved, sent.step_sum, 1), aggregate.mean.delta)
    found = trees.subtract(pushed, trees.where_given(pushed, down.correction))
    return trees.select(moved, found, trees.where_given(pushed, before))


def _step_sum(up: Up, wanted: str) -> jax.Array:
    """Rate times steps of a client that takes plain steps; others are refused.

    Args:
        up: the client's answer.
        wanted: what the user has to give where there is no such number.
    """
    if up.step_sum is None:
        raise ValueError(
            "mixed_fl: these clients do not take plain steps of one rate (momentum, "
            f"clipping, a proximal term or control variates); give {wanted}"
        )
    return up.step_sum


def _require_free(down: Down) -> Down:
    """The wrapped algorithm's first message, in which the correction must be free."""
    if down.correction is not None:
        raise ValueError(
            "mixed_fl: the wrapped algorithm sends clients a correction itself"
        )
    return down


def _encode_correction(
    algorithm: Algorithm, compressor: Compressor | None
) -> Algorithm:
    """The algorithm whose correction travels compressed, if there is a compressor."""
    if compressor is None:
        return algorithm

    def encode_down(down: Down, key: Key) -> Down:
        correction = encode(compressor, down.correction, key, None, "correction")
        return down._replace(correction=correction)

    def decode_down(down: Down) -> Down:
        if down.correction is None:
            return down
        return down._replace(correction=decode(compressor, down.correction))

    def start(params, joins, rows, key):
        down, server = algorithm.start(params, joins, rows, key)
        return encode_down(down, key), server

    def server(aggregate, down, server, rows, key):
        down, server = algorithm.server(aggregate, decode_down(down), server, rows, key)
        return encode_down(down, key), server

    return algorithm._replace(
        start=start,
        client=lambda down, *rest: algorithm.client(decode_down(down), *rest),
        server=server,
        personal=lambda down, *rest: algorithm.personal(decode_down(down), *rest),
    )
