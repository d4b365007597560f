# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL: a federated loss and a loss of the server's own, descended together.

Minimizes ``w_f f_f(x) + w_c f_c(x)``: f_f is what the wrapped algorithm minimizes over
the clients, f_c is at the server. With ``r = w_c / w_f``, x the shared model and
corrections b_c (told to clients) and b_f (kept by the server), a round is::

    clients: local steps on  grad f_i + b_c,  x_f <- the wrapped server's model
    server:  x_c <- steps from x on  r grad f_c + b_f,  each of the central rate
    x <- merge(x, a_f (x_f - x) + a_c (x_c - x))

    parallel  b_c = b_f = 0, sum: a_f = a_c = 1
    one_way   b_c = r grad f_c(x) of this round, no central steps: x <- x_f
    two_way   b_c = last round's mean of r grad f_c over the central steps, b_f = last
              round's mean gradient of the clients, average: a_f = a_c = 1/2

Central steps move as far as the clients do, unless another rate is given: rate times
steps is the clients' mean of it, for parallel times the wrapped server's gain, see
``gain``. Parallel training minimizes this mixture only then, and only with plain steps
everywhere: a server without a gain (Adam) is refused, and so is clipping around.

The clients' mean gradient is recovered from what they send anyway and one number,
``-mean delta / mean stretch - b_c``, which is right for plain steps of one rate only;
otherwise they must ``upload`` it.

Where this differs from the paper: gradients of clients do not carry w_f, that is rates
here are the paper's times w_f. Its Algorithm 1 as printed lacks the merge; two_way
averages, since either side descends the whole loss already. Its equation (10) recovers
the gradient without the clients' weights, and is wrong where those differ.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import keys, trees
from fedblend.checks import ALGORITHM, COUNT, FLAG, FUNCTION, gate, optional, words
from fedblend.compress.compressor import Compressor, decode, encode
from fedblend.core import Algorithm, Down, PyTree, Up
from fedblend.local import OPTIMIZER, Optimizer, resolve
from fedblend.transforms.compose import delta_of
from fedblend.transforms.mixed_fl.central_loss import Central, central_steps
from fedblend.transforms.mixed_fl.server_gain import gain

MERGES = {"sum": (1.0, 1.0), "average": (0.5, 0.5)}
HOW = {"parallel": "sum", "one_way": "sum", "two_way": "average"}
"""The ways, and how they merge."""


class MixedServer(NamedTuple):
    """What the server remembers: the wrapped algorithm's state, that of the merging
    optimizer, and b_f, where it is used.
    """

    inner: PyTree
    merge: PyTree
    borrowed: PyTree


class Told(NamedTuple):
    """What clients say besides: rate times steps, and their mean gradient."""

    step_sum: PyTree
    mean_gradient: PyTree


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
    merge: str | tuple[float, float] | None = None,
    merge_optimizer: float | optax.GradientTransformation = 1.0,
    upload: bool = False,
    compressor: Compressor | None = None,
) -> Algorithm:
    """The wrapped algorithm under a loss of the server's own.

    Args:
        algorithm: how the federated loss is descended, at its own rates.
        central: the server's objective, see ``central``.
        how: "parallel", "one_way" or "two_way", see above.
        weights: w_f and w_c, which sum to 1.
        steps: central steps of a round (not one_way).
        optimizer: of the central steps, started anew every round; None moves as far as
            the clients.
        merge: "sum", "average" or (a_f, a_c); the way's own if None.
        merge_optimizer: what takes the merged move, its state kept.
        upload: clients send their mean gradient (two_way), which are then averaged
            with the clients' weights, not by steps, where these differ.
        compressor: of b_c.
    """
    ratio = _checked(weights)
    plain = isinstance(merge_optimizer, float) and merge_optimizer == 1
    if how == "one_way" and not (optimizer is None and merge is None and plain):
        raise ValueError(
            "one_way: takes no central steps and merges nothing; optimizer, merge and "
            "merge_optimizer go with parallel and two_way"
        )
    pair = _pair(HOW[how] if merge is None else merge)
    if how == "parallel" and (optimizer is not None or pair[0] != pair[1]):
        warnings.warn(
            "parallel: central steps or their merging have a rate of their own; unless "
            "rate x steps is that of the clients (times the server's rate), and all "
            "steps are plain and none is clipped, another mixture than "
            f"{tuple(weights)} is minimized",
            stacklevel=3,
        )
    merging = resolve(merge_optimizer, 0, 1)
    steered = how != "one_way" and optimizer is None
    recovers = how == "two_way" and not upload

    def slope_of(params, shard, key):
        return trees.scale(ratio, central(params, shard, key))

    def say(down: Down, correction: PyTree, key) -> Down:
        if compressor is not None:
            correction = encode(compressor, correction, key, None, "correction")
        return down._replace(correction=correction)

    def understand(down: Down) -> Down:
        if compressor is None or down.correction is None:
            return down
        return down._replace(correction=decode(compressor, down.correction))

    def start(params, joins, shard, key):
        down, inner = algorithm.start(params, joins, shard, key)
        own = keys.named(key, "central")
        zeros = trees.zeros_like(down.shared)
        if how != "parallel" and down.correction is not None:
            raise ValueError(
                "mixed: the wrapped algorithm tells clients a correction itself"
            )
        if how == "one_way":
            down = say(down, slope_of(down.shared, shard, own), key)
        if how == "two_way":
            down = say(down, zeros, key)
        borrowed = zeros if how == "two_way" else ()
        return down, MixedServer(inner, merging.init(down.shared), borrowed)

    def client(down, client, shard, key):
        up, client = algorithm.client(understand(down), client, shard, key)
        delta_of(up, "mixed")
        told = Told(
            _stretch(up, steered, recovers) if steered or recovers else (),
            _slope(up) if how == "two_way" and upload else (),
        )
        return up._replace(extra=(up.extra, told)), client

    def server(aggregate, down, server, shard, key):
        down, own = understand(down), keys.named(key, "central")
        extra, said = aggregate.mean.extra
        inner_heard = aggregate._replace(mean=aggregate.mean._replace(extra=extra))
        after, inner = algorithm.server(inner_heard, down, server.inner, shard, key)
        if how == "one_way":
            new = say(after, slope_of(after.shared, shard, own), key)
            return new, server._replace(inner=inner)
        rate = optimizer
        if rate is None:
            rate = said.step_sum / steps
            if how == "parallel":
                seen = inner_heard, down, server.inner, shard
                rate = rate * _gain(algorithm, weights, *seen)
        reached, mean_gradient = central_steps(
            lambda here, key: slope_of(here, shard, key),
            down.shared,
            own,
            resolve(rate, down.round, steps),
            steps,
            server.borrowed if how == "two_way" else None,
        )
        move = trees.add(
            trees.scale(pair[0], trees.subtract(after.shared, down.shared)),
            trees.scale(pair[1], trees.subtract(reached, down.shared)),
        )
        updates, state = merging.update(
            trees.scale(-1, move), server.merge, down.shared
        )
        after = after._replace(shared=optax.apply_updates(down.shared, updates))
        if how == "parallel":
            return after, MixedServer(inner, state, ())
        borrowed = said.mean_gradient
        if recovers:
            moved = said.step_sum > 0  # else nobody took a step, and b_f stays
            pushed = trees.scale(
                -1 / jnp.where(moved, said.step_sum, 1), aggregate.mean.delta
            )
            borrowed = trees.subtract(
                pushed, trees.where_given(pushed, down.correction)
            )
            before = trees.where_given(pushed, server.borrowed)
            borrowed = trees.select(moved, borrowed, before)
        # What clients keep to themselves they say no gradient of.
        borrowed = trees.fill(borrowed, trees.zeros_like(down.shared))
        return say(after, mean_gradient, key), MixedServer(inner, state, borrowed)

    def undo(up):
        extra, told = up.extra
        plain = algorithm.decode(up._replace(extra=extra))
        return plain._replace(extra=(plain.extra, told))

    return algorithm._replace(
        start=start,
        client=client,
        server=server,
        personal=lambda down, client, shard, key: algorithm.personal(
            understand(down), client, shard, key
        ),
        decode=undo,
        needs=algorithm.needs._replace(
            mean=algorithm.needs.mean or how == "two_way",
            length=algorithm.needs.length
            or recovers
            or (steered and how == "parallel"),
        ),
    )


def _checked(weights: tuple[float, float]) -> float:
    """The ratio of the weights, of settings that make sense."""
    federated, central = weights
    if abs(federated + central - 1) > 1e-6 or federated <= 0 or central < 0:
        raise ValueError(
            f"weights: {tuple(weights)} are not a positive and a nonnegative number "
            "that sum to 1"
        )
    return central / federated


def _pair(merge: str | tuple[float, float]) -> tuple[float, float]:
    if not isinstance(merge, str):
        if len(merge) != 2 or min(merge) < 0:
            raise ValueError(f"merge: {merge} are not two numbers, 0 or more")
        return merge
    if merge not in MERGES:
        raise ValueError(
            f"merge: {merge!r} is unknown, it is {', '.join(MERGES)} or two numbers"
        )
    return MERGES[merge]


def _gain(algorithm: Algorithm, weights: tuple[float, float], *seen) -> float:
    found = gain(algorithm.server, *seen)
    if found is None:
        raise ValueError(
            "mixed: this server does not move by a constant multiple of the clients' "
            "mean step (Adam, a schedule or clipping), so that parallel would minimize "
            f"another mixture than {tuple(weights)}; use one_way, or such an optimizer "
            "as merge_optimizer over a plain server"
        )
    return found


def _slope(up: Up) -> PyTree:
    if up.mean_gradient is None:
        raise ValueError(
            "mixed: upload: these clients have no gradient to send (it would go past "
            "their privacy, or they keep it to themselves)"
        )
    return up.mean_gradient


def _stretch(up: Up, steered: bool, recovers: bool) -> jax.Array:
    if up.step_sum is not None:
        return up.step_sum
    wants = []
    if recovers:
        wants.append("upload=True, since their gradient cannot be recovered")
    if steered:
        wants.append("an optimizer for the central steps")
    raise ValueError(
        "mixed: these clients do not take plain steps of one rate (momentum, clipping, "
        f"a proximal term or control variates); give {' and '.join(wants)}"
    )
