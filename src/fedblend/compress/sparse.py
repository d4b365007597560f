# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressors that send some entries of a vector: identity, rand-k, top-k, perm-k.

Clients of a round may share one mask, so that their mean is as sparse as each answer.
The server then sends a seed with every message, from which all clients draw the same
entries. The shared model changes at these entries alone, and the server sends the
entries of the change instead of the model. Only the first message, and the one to a new
client that deploys, have the whole model.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.batches import client_entry
from fedblend.checks import COUNT, Count, each_client, gate, words
from fedblend.compress.compressor import Compressor, Encoded, pack, unpack, width_of
from fedblend.core import Key, PyTree, Ragged, Shard
from fedblend.errors import UserError


class Entries(NamedTuple):
    """Some entries of a vector: their values, and their places as they are sent."""

    values: Any
    places: PyTree


def identity() -> Compressor:
    """The vector as it is; omega = 0, delta = 1."""
    return Compressor(
        compress=lambda vector, key, shard: vector,
        decompress=lambda payload, dim, key, client: payload,
        omega=lambda dim: 0.0,
        delta=lambda dim: 1.0,
        name="identity",
    )


@gate()
def rand_k(
    k: Annotated[int | np.ndarray, each_client(COUNT)],
    *,
    places: Annotated[str, words("shared", "seed", "sent")] = "shared",
) -> Compressor:
    """``k`` entries chosen at random, scaled by dim/k: unbiased, omega = dim/k - 1.

    Args:
        k: how many entries, at most dim; an array over clients where they differ.
        places: how the receiver learns which entries: "shared" (both sides draw them
            from the key of the round and the client, nothing is sent), "seed" (the
            client sends the 64 bits they are drawn from, as a server always does) or
            "sent" (each place in as few bits as dim needs).
    """
    most = int(np.max(k))

    def draw(key: Key, dim: int) -> jax.Array:
        _check(most, dim, "rand_k")
        # 30 random bits as the float32 of the same order, none of them subnormal: the
        # largest floats are found many times faster than the largest integers.
        bits = (jax.random.bits(key, (dim,), jnp.uint32) >> 2) + jnp.uint32(1 << 23)
        as_floats = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return jax.lax.top_k(as_floats, most)[1]

    def compress(vector: jax.Array, key: Key, shard: Shard | None) -> Entries:
        dim = len(vector)
        index, own = draw(key, dim), _own(k, shard, "rand_k")
        wide = jnp.promote_types(vector.dtype, jnp.float32)
        scale = dim / own.astype(wide)
        values = (vector[index].astype(wide) * scale).astype(vector.dtype)
        if places == "sent":
            return _entries(values, index, dim, k, own)
        known = places == "shared" and shard is not None
        return Entries(_cut(values, k, own), () if known else jax.random.key_data(key))

    def decompress(payload: Entries, dim: int, key, client) -> jax.Array:
        sent = payload.places
        if places == "sent":
            index = _unpack_places(sent, most, dim)
        else:
            known = isinstance(sent, tuple)
            index = draw(key if known else jax.random.wrap_key_data(sent), dim)
        return _scatter(payload.values, index, dim)

    def omega(dim: int):
        _check(most, dim, "rand_k")
        return dim / np.asarray(k) - 1.0

    masks = places != "sent" and np.ndim(k) == 0
    return Compressor(
        compress, decompress, omega=omega, name=f"rand_k({k})", masks=masks
    )


@gate()
def top_k(k: Annotated[int | np.ndarray, each_client(COUNT)]) -> Compressor:
    """The ``k`` entries of largest absolute value; biased, delta = k/dim.

    ``k`` is at most dim; an array over clients where they differ. Clients send values
    and places; ties go to the first entries.
    """
    most = int(np.max(k))

    def compress(vector: jax.Array, key: Key, shard: Shard | None) -> Entries:
        dim = len(vector)
        _check(most, dim, "top_k")
        index = jax.lax.top_k(jnp.abs(vector), most)[1]
        return _entries(vector[index], index, dim, k, _own(k, shard, "top_k"))

    def decompress(payload: Entries, dim: int, key, client) -> jax.Array:
        return _scatter(payload.values, _unpack_places(payload.places, most, dim), dim)

    def delta(dim: int):
        return np.asarray(k) / dim

    return Compressor(compress, decompress, delta=delta, name=f"top_k({k})")


@gate()
def perm_k(clients: Count) -> Callable[[Key], Compressor]:
    """Perm-k: each of n clients sends its own n-th of the entries, scaled by n.

    All clients and the server use one permutation a round. The result maps a round's
    common key to the compressor for n clients; ``transforms.perm_k`` provides the key.
    Clients send values only. Each client's compressor is unbiased with omega = n - 1,
    and together the clients send every entry once, so that equal vectors are averaged
    without any error. Where n does not divide dim, zeros fill the vector up.

    Reference: Szlendak, Tyurin, Richtárik, "Permutation compressors for provably faster
    distributed nonconvex optimization", ICLR 2022, arXiv:2110.03300.
    """

    def block(common: Key, place: jax.Array, dim: int) -> jax.Array:
        # Permuting the padding too gives every entry the same chance of every block.
        room = -(-dim // clients)
        order = jax.random.permutation(common, room * clients)
        return jax.lax.dynamic_slice_in_dim(order, place * room, room)

    def compressor(common: Key) -> Compressor:
        def compress(vector: jax.Array, key: Key, shard: Shard | None) -> jax.Array:
            if shard is None:
                raise ValueError(
                    "perm_k: compresses at clients only, not at the server"
                )
            index = block(common, shard.id, len(vector))
            return vector.at[index].get(mode="fill", fill_value=0) * clients

        def decompress(values: jax.Array, dim: int, key, client) -> jax.Array:
            zeros = jnp.zeros(dim, values.dtype)
            return zeros.at[block(common, client, dim)].set(values, mode="drop")

        return Compressor(
            compress,
            decompress,
            omega=lambda dim: clients - 1.0,
            name=f"perm_k({clients})",
            clients=clients,
        )

    return compressor


@gate()
def dealt(clients: Count, copies: Count, seed: jax.Array) -> Compressor:
    """Every entry at ``copies`` of n clients, which scale it by n/copies.

    The entries are dealt out in order, each ``copies`` times, to clients in the random
    order of a seed that all know: each set of ``copies`` clients is equally likely to
    have an entry. Unbiased with omega = n/copies - 1. Clients send values only, as many
    each; zeros fill up where n does not divide copies times dim.

    Args:
        clients: n, the number of clients, all of whom take part.
        copies: how many clients send each entry.
        seed: the data of a key, the same for all clients of a round.
    """

    def places(client: jax.Array, dim: int) -> jax.Array:
        order = jax.random.permutation(jax.random.wrap_key_data(seed), clients)
        room = -(-copies * dim // clients)
        return (order[client] + clients * jnp.arange(room)) // copies

    def compress(vector: jax.Array, key: Key, shard: Shard | None) -> jax.Array:
        assert shard is not None
        index = places(shard.id, len(vector))
        values = vector.at[index].get(mode="fill", fill_value=0)
        return values * (clients / copies)

    def decompress(values: jax.Array, dim: int, key, client) -> jax.Array:
        zeros = jnp.zeros(dim, values.dtype)
        return zeros.at[places(client, dim)].set(values, mode="drop")

    return Compressor(
        compress,
        decompress,
        omega=lambda dim: clients / copies - 1,
        name=f"dealt({clients}, {copies})",
        clients=clients,
    )


def _check(k: int, dim: int, name: str) -> None:
    if k > dim:
        allowed = f"from 1 to {dim}, the entries of the model"
        raise UserError(f"{name}: k", k, allowed)


def _own(k: int | np.ndarray, shard: Shard | None, name: str) -> jax.Array:
    """The k of the client that compresses."""
    if shard is not None:
        return client_entry(k, shard)
    if np.ndim(k) > 0:
        raise ValueError(f"{name}: k differs by client, but the server compresses")
    return jnp.asarray(k, jnp.int32)


def _cut(values: jax.Array, k: int | np.ndarray, own: jax.Array) -> Any:
    """The values; a client with a smaller k sends the first ones only."""
    if np.ndim(k) == 0:
        return values
    used = own.astype(jnp.int32)
    return Ragged(jnp.where(jnp.arange(len(values)) < used, values, 0), used)


def _entries(
    values: jax.Array, index: jax.Array, dim: int, k: int | np.ndarray, own: jax.Array
) -> Entries:
    """Values and their places, both as they are sent."""
    width = width_of(dim - 1)
    packed: Any = pack(index, width)
    if np.ndim(k) > 0:
        packed = Ragged(packed, ((own * width + 7) // 8).astype(jnp.int32))
    return Entries(_cut(values, k, own), packed)


def _unpack_places(sent: PyTree, k: int, dim: int) -> jax.Array:
    """The places of k entries."""
    packed = sent.buffer if isinstance(sent, Ragged) else sent
    return unpack(packed, k, width_of(dim - 1))


def _scatter(values: Any, index: jax.Array, dim: int) -> jax.Array:
    """Zeros but for the values; places beyond a client's own k have value zero."""
    values = values.buffer if isinstance(values, Ragged) else values
    return jnp.zeros(dim, values.dtype).at[index].add(values, mode="drop")


NAME = "one mask"
"""Of the random keys, and of the part of a message that has the seed."""


class MaskedChange(NamedTuple):
    """How the shared model came about: its change, the seed of the entries, if any."""

    change: PyTree
    seed: jax.Array
    first: jax.Array


class Told(NamedTuple):
    """The shared model as a client receives it: entries, or all of it at first."""

    entries: Encoded
    whole: Ragged


def seed_of(key: Key) -> jax.Array:
    """The seed of a round's mask."""
    return jax.random.key_data(keys.named(key, NAME))


def fix_places(compressor: Compressor, seed: jax.Array) -> Compressor:
    """The compressor with the places of this seed, which are not sent."""
    common = jax.random.wrap_key_data(seed)
    return compressor._replace(
        compress=lambda vector, key, shard: (
            compressor.compress(vector, common, shard).values
        ),
        decompress=lambda values, dim, key, client: compressor.decompress(
            Entries(values, ()), dim, common, None
        ),
    )


def first_change(shared: PyTree) -> MaskedChange:
    """That of the first message."""
    seed, first = jnp.zeros(2, jnp.uint32), jnp.ones((), bool)
    return MaskedChange(trees.zeros_like(shared), seed, first)


def note_change(change: PyTree, seed: jax.Array) -> MaskedChange:
    """That of a later message."""
    return MaskedChange(change, seed, jnp.zeros((), bool))


def tell_change(compressor: Compressor, shared: PyTree, past: MaskedChange) -> Told:
    """The message: the entries of the change, which has no others; all at first."""
    vector, layout = trees.ravel(past.change)
    own, omega = fix_places(compressor, past.seed), compressor.omega
    assert omega is not None
    # The compressor multiplies what it keeps by 1 + omega.
    common = jax.random.wrap_key_data(past.seed)
    values = own.compress(vector / (1 + omega(layout.size)), common, None)
    used = jnp.where(past.first, layout.size, 0).astype(jnp.int32)
    whole = jnp.where(past.first, trees.ravel(shared)[0], 0)
    return Told(Encoded(values, layout), Ragged(whole, used))


def receive_change(
    compressor: Compressor, message: Told, before: PyTree, seed: jax.Array
) -> PyTree:
    """The shared model, by a client that knows what it was before the change."""
    entries, layout = message.entries, message.entries.layout
    change = fix_places(compressor, seed).decompress(
        entries.payload, layout.size, None, None
    )
    after = trees.add(before, trees.unravel(change, layout))
    whole = trees.unravel(message.whole.buffer, layout)
    return trees.select(message.whole.used > 0, whole, after)
