# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is, and what passes between its two halves.

A federated algorithm is a named tuple of pure functions. Both halves, the client's
and the server's, are in one file and exchange three kinds of message::

    Down  --> client_i (down, state_i, shard_i, key_i) --> Up, state_i'
    Aggregate --> server (aggregate, down, server, central, key) --> Down', server'

`Aggregate` is a weighted mean of the clients' ups: the server never sees a single one,
so that running sums, any cohort size and secure aggregation stay possible. Nothing in
the tuple knows whether the cohort is mapped over one device (``fb.simulate``) or
spread over machines, one client each.

What every function may rely on, and must keep:

*Purity.* All randomness comes from the key that is handed in; see ``keys``. States
are named tuples of arrays, whose structure, shapes and dtypes never change from round
to round, and no leaf is weakly typed.

*Where things live.* The shared model lives in ``down.shared`` and nowhere else. A
client's state never travels. The server's own data, if it has any, is the shard
``central``.

*Who takes part.* Some of the cohort may not answer, or answer with something unusable.
They keep the state they had, and ``aggregate.participation`` is the received part of
the whole federation's weight. A server that keeps the mean of the clients'
memories (SCAFFOLD, DIANA, EF21) needs just that number: ``memory += participation *
mean(change)``. If no answer is received, server and message stay as they are.

*Rounds.* The runtime counts them, from 0, and writes the count into ``down.round``.
What enrollment sends to the server (``join``) arrives once, before the first round, so
that no compiled function branches on the round.

*Weights.* ``alpha`` is always the weight of the shared model: 1 is purely global.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any
"""Any tree of arrays: parameters, a state, a message, the examples of a batch."""

Key = jax.Array
"""A JAX random key."""

Loss = Callable[..., jax.Array]
"""``loss(params, rows) -> losses[rows]``: one number for every example.

It may have parameters named ``key``, the random key of a training step, which is None
in evaluation, and ``mask``, which is that of the ``Batch``.
"""

STATIC = {"static": True}
"""Marks a field of a tree that is no leaf: compiled functions know its value."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """The data of one client: rows ``start`` to ``start + count`` of ``examples``.

    A federation is many shards over the same flat arrays, so nothing is padded and a
    cohort is one gather. ``capacity``, the largest count of the whole federation, is
    static: every client, also on a real node, computes with the same shapes. ``salt``,
    two words of 32 bits, is a node's secret: batches then depend on it besides the key.
    ``mean_count``, that of all clients, is static, too, and None where it is not known:
    it changes the time that a round takes, and nothing else.
    """

    examples: PyTree
    start: jax.Array
    count: jax.Array
    id: jax.Array
    capacity: int = dataclasses.field(metadata=STATIC)
    salt: jax.Array | None = None
    mean_count: float | None = dataclasses.field(default=None, metadata=STATIC)


class Drawn(NamedTuple):
    """Rows drawn with replacement: their numbers, and how many rows there were."""

    index: jax.Array
    among: jax.Array


class Batch(NamedTuple):
    """Some rows of a shard; ``mask`` is False on rows that only pad the shape.

    ``drawn`` is None where no row comes twice. ``key`` is that of a training step, and
    None where the model is only evaluated.
    """

    rows: PyTree
    mask: jax.Array | None = None
    drawn: Drawn | None = None
    key: Key | None = None


Extra = dict[str, PyTree]
"""What else a message holds: every algorithm and transform adds under its own name."""

NO_EXTRA: Extra = {}


class Down(NamedTuple):
    """The message of the server to the clients of a round.

    ``correction`` is a tree added to every local gradient in ``shared`` (None costs
    nothing); ``extra`` is whatever else is needed, by the name of who needs it.
    """

    shared: PyTree
    round: jax.Array
    correction: PyTree | None = None
    extra: Extra = NO_EXTRA


class Up(NamedTuple):
    """The answer of a client.

    ``delta`` has the structure of the parameters, None at what a client keeps to
    itself. ``mean_gradient``, the mean raw local gradient in ``shared``, never
    travels: a transform that needs it moves it to ``extra``, otherwise it is not
    computed. The same holds for ``step_sum``, rate times steps of a client that took
    plain steps, so that ``delta = -step_sum * (mean_gradient + correction)``; None
    where that is not so.
    """

    delta: PyTree
    mean_gradient: PyTree | None = None
    extra: Extra = NO_EXTRA
    step_sum: jax.Array | None = None


class Aggregate(NamedTuple):
    """The answers of a round, summed up.

    ``mean`` is the weighted mean of the decoded ups, ``participation`` the received
    weight over the weight of the whole federation, ``count`` the number of answers.
    """

    mean: Any
    participation: jax.Array
    count: jax.Array


class Ragged(NamedTuple):
    """A buffer of fixed shape of which only the first ``used`` entries travel."""

    buffer: jax.Array
    used: jax.Array


class Sender(NamedTuple):
    """Who sent an answer, and with what: all that the server knows of it by itself.

    ``key`` is the one that the client's half was handed, a function of seed, round and
    client, and ``down`` the message of the round. What a client can only repeat of
    these, such as its number or a random draw, never travels.
    """

    id: jax.Array
    key: Key
    down: Down


class Needs(NamedTuple):
    """Static facts that a runtime checks before it starts."""

    everyone: bool = False
    """Every client must take part in every round."""
    mean: bool = False
    """The server keeps a mean of client memories, or counts on a mean otherwise: no
    median, no trimming."""
    memories: bool = False
    """It keeps such a mean by ``aggregate.participation``: clients are drawn equally
    often."""
    uniform: bool = False
    """Only clients of equal weight make sense."""
    weights: str = "by_count"
    """The weights used when the user names none: "by_count" or "uniform"."""
    cohort: int | None = None
    """The only number of clients that a round may be planned with; any if None."""
    secret_cohorts: bool = False
    """Nobody may compute who takes part: cohorts come from the operating system."""
    answers: bool = False
    """A round without any answer leaves the server as it is: a cohort is never empty by
    chance."""
    length: bool = False
    """How long clients' answers are has a meaning: nothing may clip them."""
    gain: float | None = None
    """How far all of the server's moves go that a mean step of length 1 brings about;
    None where it moves in another way, or where that is not known."""
    turns: bool = False
    """The server moves some parameters in some rounds only: noise that later rounds are
    to cancel would stay."""
    feedback: str = ""
    """What to use instead of compressed answers, or of this algorithm: clients carry an
    error of the shared model over to their next answer, at any rate. Or empty."""
    exact: str = ""
    """Likewise, instead of compressed broadcasts: clients need the server's model."""
    whole: bool = False
    """To deploy, a client receives the whole message, not only what it asks for."""
    clients: int | None = None
    """The only number of clients that a federation may have; any if None."""
    lengths: tuple[tuple[str, int], ...] = ()
    """Arguments that are arrays over clients, and how long they are; see ``checks``."""


class Wire(NamedTuple):
    """How messages travel, where not every client gets the same, or answers in full.

    ask       (client, shard) -> request: what this client needs of the message.
    tell      (down, request) -> down_i: the message to one client.
    decode    (up, sender) -> Up: undoes what an encoding transform did, at the server.
    """

    ask: Callable[[PyTree, Shard], PyTree] = lambda client, shard: ()
    tell: Callable[[Down, PyTree], Down] = lambda down, request: down
    decode: Callable[[Any, Sender], Up] = lambda up, sender: up


def shared_model(down: Down, client: PyTree, shard: Shard, key: Key) -> PyTree:
    """``personal`` of the methods that have one model for everybody."""
    del client, shard, key
    return down.shared


def no_state(params: PyTree, shard: Shard, key: Key) -> tuple[PyTree, PyTree]:
    """``enroll`` of the methods whose clients remember and send nothing."""
    del params, shard, key
    return (), ()


def start_with_params(
    params: PyTree, joins: Aggregate, central: Shard | None, key: Key
) -> tuple[Down, PyTree]:
    """``start`` of the methods whose first message is the initial model."""
    del joins, central, key
    return Down(params, jnp.zeros((), jnp.int32)), ()


Info = dict[str, PyTree]
"""Diagnostics of one client, by name; a scalar becomes a column of ``clients.csv``."""


def no_info(client: PyTree) -> Info:
    """``info`` of the methods whose clients have nothing to show."""
    del client
    return {}


class Algorithm(NamedTuple):
    """Both halves of a federated algorithm; see the text of this module.

    enroll    (params, shard, key) -> (join, client). May train: FLIX's pure local
              model is enrollment. Where ``join`` is empty it may happen lazily.
    start     (params, joins, central, key) -> (down, server): the first message.
    client    (down, client, shard, key) -> (up, client): a round at one client.
    server    (aggregate, down, server, central, key) -> (down, server).
    personal  (down, client, shard, key) -> params or Blend: the model this client
              would deploy, from the message it receives. Methods that fine-tune do it
              here.
    wire      how messages travel.
    needs     what the runtime has to provide.
    info      client -> {name: diagnostic}: what reports show of a client's state, such
              as alpha or the norm of a gradient.
    """

    enroll: Callable[[PyTree, Shard, Key], tuple[PyTree, PyTree]]
    start: Callable[[PyTree, Aggregate, Shard | None, Key], tuple[Down, PyTree]]
    client: Callable[[Down, PyTree, Shard, Key], tuple[Up, PyTree]]
    server: Callable[[Aggregate, Down, PyTree, Shard | None, Key], tuple[Down, PyTree]]
    personal: Callable[[Down, PyTree, Shard, Key], PyTree] = shared_model
    wire: Wire = Wire()
    needs: Needs = Needs()
    info: Callable[[PyTree], Info] = no_info


def is_ragged(node: Any) -> bool:
    """Whether this part of a message travels only in part."""
    return isinstance(node, Ragged)


def _message_leaves(message: PyTree) -> tuple[list[Any], list[Ragged]]:
    leaves = jax.tree.leaves(message, is_leaf=is_ragged)
    ragged = [leaf for leaf in leaves if is_ragged(leaf)]
    return [leaf for leaf in leaves if not is_ragged(leaf)], ragged


def static_bits(message: PyTree) -> int:
    """Bits of the leaves of a message that always travel, as a Python integer."""
    leaves, _ = _message_leaves(message)
    return sum(8 * jnp.dtype(leaf.dtype).itemsize * leaf.size for leaf in leaves)


def has_ragged(message: PyTree) -> bool:
    """Whether some leaves travel only in part."""
    return bool(_message_leaves(message)[1])


def ragged_bits(message: PyTree) -> jax.Array | None:
    """Bits of the used parts of the ragged leaves, or None where there are none."""
    used = [
        8 * jnp.dtype(leaf.buffer.dtype).itemsize * leaf.used.astype(jnp.int32)
        for leaf in _message_leaves(message)[1]
    ]
    return jnp.stack(used).sum(dtype=jnp.int32) if used else None
