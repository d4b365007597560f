# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The step that the algorithms of Mixed FL share, and their messages and state.

The step is the server's half of a round: central steps beside those of the clients, and
the merge of both models into the shared one::

    x_c <- x, then steps times:  x_c <- x_c - central rate * (g_c(x_c) + added)
    x   <- merge optimizer(x, a_f (x_f - x) + a_c (x_c - x))

with ``g_c = w_c / w_f grad f_c``, x_f the model of the wrapped algorithm's server, and
``added`` the federated gradient of two-way transfer.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import keys, trees
from fedblend.compress.compressor import Compressor, decode, encode
from fedblend.core import Aggregate, Algorithm, Down, Key, PyTree, Shard, Up
from fedblend.local import Optimizer, resolve
from fedblend.transforms.mixed_fl.central_loss import Central
from fedblend.transforms.wrapping import delta_of

MERGES = {"sum": (1.0, 1.0), "average": (0.5, 0.5)}
Merge = str | tuple[float, float]
"""The factors a_f and a_c, or the name of a pair."""


class Settings(NamedTuple):
    """The arguments of ``mixed_fl``, which explains them."""

    weights: tuple[float, float]
    steps: int
    optimizer: Optimizer | None
    merge: Merge | None
    merge_optimizer: Optimizer
    upload: bool
    compressor: Compressor | None


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
        updates, state = rule.update(push, state, here)
        moved = optax.apply_updates(here, updates)
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
        updates, state = self.rule.update(trees.scale(-1, move), state, shared)
        return optax.apply_updates(shared, updates), state


def merging(settings: Settings, default: str) -> Merging:
    """The merge that the settings ask for; ``default`` are the usual factors."""
    merge = default if settings.merge is None else settings.merge
    if isinstance(merge, str) and merge not in MERGES:
        raise ValueError(
            f"merge: {merge!r} is unknown, it is {', '.join(MERGES)} or two numbers"
        )
    factors = MERGES[merge] if isinstance(merge, str) else merge
    if len(factors) != 2 or min(factors) < 0:
        raise ValueError(f"merge: {merge} are not two numbers, 0 or more")
    return Merging(factors, resolve(settings.merge_optimizer, 0, 1))


def sending(algorithm: Algorithm, sent: Callable[[Up], Sent]) -> Algorithm:
    """The algorithm whose clients also send ``sent(up)``; ``received`` reads it."""

    def client(down, client, shard, key):
        up, client = algorithm.client(down, client, shard, key)
        delta_of(up, "mixed_fl")
        return up._replace(extra=(up.extra, sent(up))), client

    def decode(up):
        extra, more = up.extra
        plain = algorithm.decode(up._replace(extra=extra))
        return plain._replace(extra=(plain.extra, more))

    return algorithm._replace(client=client, decode=decode)


def received(aggregate: Aggregate) -> tuple[Aggregate, Sent]:
    """The aggregate for the wrapped algorithm, and the mean of what was also sent."""
    extra, sent = aggregate.mean.extra
    return aggregate._replace(mean=aggregate.mean._replace(extra=extra)), sent


def step_sum(up: Up, wanted: str) -> jax.Array:
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


def without_correction(down: Down) -> Down:
    """The wrapped algorithm's first message, in which the correction must be free."""
    if down.correction is not None:
        raise ValueError(
            "mixed_fl: the wrapped algorithm sends clients a correction itself"
        )
    return down


def encoded_correction(
    algorithm: Algorithm, compressor: Compressor | None
) -> Algorithm:
    """The algorithm whose correction travels compressed, if there is a compressor."""
    if compressor is None:
        return algorithm

    def encoded(down: Down, key: Key) -> Down:
        correction = encode(compressor, down.correction, key, None, "correction")
        return down._replace(correction=correction)

    def decoded(down: Down) -> Down:
        if down.correction is None:
            return down
        return down._replace(correction=decode(compressor, down.correction))

    def start(params, joins, rows, key):
        down, server = algorithm.start(params, joins, rows, key)
        return encoded(down, key), server

    def server(aggregate, down, server, rows, key):
        down, server = algorithm.server(aggregate, decoded(down), server, rows, key)
        return encoded(down, key), server

    return algorithm._replace(
        start=start,
        client=lambda down, *rest: algorithm.client(decoded(down), *rest),
        server=server,
        personal=lambda down, *rest: algorithm.personal(decoded(down), *rest),
    )
