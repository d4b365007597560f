# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressed messages: what a client says is compressed, and nothing else changes.

Wraps an algorithm. Over distributed gradient descent this is DCGD::

    delta_i <- the wrapped algorithm's step at client i
    heard   <- mean of C_i(delta_i)

``delta`` alone is compressed, never what else travels in ``extra``. With the identity
as compressor it is exactly the wrapped run. An unbiased compressor leaves the mean step
as it is and adds noise, so that a constant rate reaches a neighborhood of the optimum
only; ``diana`` and ``ef21`` reach the optimum.

Where this differs from the papers: they compress the gradient, this the step ``-rate *
gradient``, which is the same for a compressor with ``C(r x) = r C(x)``.

Reference: Khirirat, Feyzmahdavian, Johansson, "Distributed learning with compressed
gradients", 2018, arXiv:1806.06573.
"""

from fedblend.checks import ALGORITHM, gate
from fedblend.compress.compressor import COMPRESSOR, Compressor, decode, encode
from fedblend.core import Algorithm
from fedblend.transforms.compose import delta_of, needs_with


@gate(algorithm=ALGORITHM, compressor=COMPRESSOR)
def compressed(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """The wrapped algorithm with compressed answers.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        compressor: of every client's ``delta``; see ``fedblend.compress``.
    """

    def client(down, client, shard, key):
        up, client = algorithm.client(down, client, shard, key)
        delta = delta_of(up, "compressed")
        return up._replace(
            delta=encode(compressor, delta, key, shard, "compress")
        ), client

    def undo(up):
        return algorithm.decode(up._replace(delta=decode(compressor, up.delta)))

    needs = needs_with(compressor.clients, algorithm, "compressed")
    return algorithm._replace(client=client, decode=undo, needs=needs)
