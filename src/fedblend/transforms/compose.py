# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Transforms of algorithms: what may stand inside, and what passes through."""

from fedblend.compress.compressor import Encoded
from fedblend.core import Algorithm, Needs, PyTree, Up, has_ragged


def delta_of(up: Up, wrapper: str) -> PyTree:
    """What a client says, or one clear line if there is nothing to encode."""
    if up.delta is None:
        raise ValueError(f"{wrapper}: the wrapped algorithm's clients say nothing")
    if isinstance(up.delta, Encoded) or has_ragged(up.delta):
        raise ValueError(
            f"{wrapper}: what the wrapped algorithm says is encoded already; only one "
            "of compressed, diana, ef21 and select, outermost"
        )
    return up.delta


def needs_with(clients: int | None, algorithm: Algorithm, wrapper: str) -> Needs:
    """What is needed where a compressor is for just so many clients, or for any."""
    needs = algorithm.needs
    if clients is None:
        return needs
    if needs.cohort not in (None, clients):
        raise ValueError(
            f"{wrapper}: the compressor is for {clients} clients in a round, and the "
            f"wrapped algorithm for {needs.cohort}"
        )
    return needs._replace(
        everyone=True, uniform=True, weights="uniform", cohort=clients
    )


def check_length(algorithm: Algorithm, wrapper: str) -> None:
    """Refuse to clip what must arrive as long as clients made it."""
    if algorithm.needs.length:
        raise ValueError(
            f"{wrapper}: the server counts on answers as long as clients made them "
            "(mixed by parallel, or by two_way without upload), and clipping would "
            "lead to another mixture; use one_way"
        )


def through(algorithm: Algorithm) -> Algorithm:
    """The algorithm for clients whose state has its own state as ``inner``.

    What a client deploys and asks for is left to it; the rest is the transform's.
    """
    return algorithm._replace(
        personal=lambda down, client, shard, key: algorithm.personal(
            down, client.inner, shard, key
        ),
        ask=lambda client, shard: algorithm.ask(client.inner, shard),
        info=lambda client: algorithm.info(client.inner),
    )
