# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's step in an attempt at a secure sum: it removes the masks of the sum."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from fedblend_federation.secure import masks
from fedblend_federation.secure.masks import KEY_BYTES, SecureError, add_mask, unseal
from fedblend_federation.secure.session import (
    Graph,
    Opened,
    pair_mask_seed,
    self_mask_seed,
)


def unmask(
    total: np.ndarray,
    graph: Graph,
    view: bytes,
    shared: Mapping[int, bytes],
    answered: Sequence[int],
    openings: Mapping[int, Opened],
) -> np.ndarray:
    """The sum of the answers, from the sum of the masked ones.

    Args:
        total: the sum of the masked answers.
        graph: of the attempt.
        view: the digest of the view that all nodes have.
        shared: the box with the seeds of pairs, of each client that handed out shares.
        answered: the clients whose masked answers are in the sum, in order.
        openings: what nodes opened, by client.

    Raises:
        SecureError: too few nodes opened.
    """
    result, readable = total.copy(), _readable(graph, shared, answered, openings)
    for client in sorted(shared):
        found = {
            holder + 1: readable[holder][client]
            for holder in graph.holders[client]
            if client in readable.get(holder, {})
        }
        try:
            secret = masks.combine(found, graph.threshold)
        except SecureError as error:
            raise SecureError(f"client {client}: {error}") from None
        if client in answered:
            add_mask(result, self_mask_seed(secret, view), -1)
            continue
        seeds = unseal(secret, shared[client])
        for at, other in enumerate(graph.neighbors(client, graph.holders[client])):
            if other in answered:
                pair = seeds[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                sign = -1 if other < client else +1
                add_mask(result, pair_mask_seed(pair, view), sign)
    return result


def _readable(
    graph: Graph,
    shared: Mapping[int, bytes],
    answered: Sequence[int],
    openings: Mapping[int, Opened],
) -> dict[int, dict[int, bytes]]:
    """The shares that nodes gave, by node and client.

    What a node gave is left out where too few others have its view, or where it does
    not open.
    """
    tokens = {
        (giver, owner): token
        for giver, one in openings.items()
        for owner, token in zip(
            graph.neighbors(giver, answered), one.tokens, strict=True
        )
    }
    found, size = {}, masks.SHARE_BYTES
    for owner, one in openings.items():
        shares = {owner + 1: one.own}
        others = graph.neighbors(owner, answered)
        for giver, box in zip(others, one.key_shares, strict=True):
            # The token of a node with another view does not open it.
            with suppress(KeyError, SecureError):
                shares[giver + 1] = unseal(tokens[giver, owner], box)
        try:
            content = unseal(masks.combine(shares, graph.threshold), one.box)
        except SecureError:
            continue
        clients = sorted((owner, *graph.neighbors(owner, shared)))
        found[owner] = {
            client: content[at * size : (at + 1) * size]
            for at, client in enumerate(clients)
            if client not in one.damaged
        }
    return found
