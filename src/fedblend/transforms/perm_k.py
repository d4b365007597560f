# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Perm-k updates: together the clients send every entry once.

Wraps an algorithm. The server sends a common seed with every message, from which all n
clients draw the same permutation of the entries; client i sends the i-th block of its
update, one n-th of the entries, scaled by n::

    delta_i <- the wrapped algorithm's update at client i
    delta   <- mean of n * (block i of delta_i)

Clients with equal updates are averaged without any error, and the variance grows with
how much updates differ. All clients must take part, with equal weights. A client sends
the values of its block and nothing else: the server knows the seed and the client's id.

Where this differs from the paper: it compresses updates, ``-rate * gradient``, and
where n does not divide the number of entries, zeros fill the vector up.

Reference: Szlendak, Tyurin, Richtárik, "Permutation compressors for provably faster
distributed nonconvex optimization", ICLR 2022, arXiv:2110.03300.
"""

import jax

from fedblend import compress
from fedblend.checks import ALGORITHM, COUNT, gate
from fedblend.core import Algorithm
from fedblend.registry import transform
from fedblend.transforms.compressed import compressed
from fedblend.transforms.wrapping import (
    needs_with,
    warn_of_feedback,
    with_common_seed,
    without_warning,
)

PURPOSE = "permuted"
"""Of the random keys; another word would draw other permutations."""


@transform(encodes=True)
@gate(algorithm=ALGORITHM, clients=COUNT)
def perm_k(algorithm: Algorithm, *, clients: int) -> Algorithm:
    """The wrapped algorithm with perm-k updates.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        clients: the number of clients, all of whom take part in every round.
    """
    warn_of_feedback(algorithm.needs.feedback, "perm_k", "perm_k")
    inner = without_warning(algorithm)

    def seeded(seed: jax.Array) -> Algorithm:
        common = jax.random.wrap_key_data(seed)
        return compressed(inner, compress.perm_k(clients)(common))

    needs = needs_with(clients, algorithm, "perm_k")
    return with_common_seed(algorithm, seeded, PURPOSE)._replace(needs=needs)
