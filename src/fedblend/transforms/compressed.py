# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressed updates: clients compress what they send, and nothing else changes.

Wraps an algorithm. Over distributed gradient descent this is DCGD::

    delta_i <- the wrapped algorithm's update at client i
    delta   <- mean of C_i(delta_i)

``delta`` alone is compressed, never ``extra``. With the identity as compressor it is
exactly the wrapped run. An unbiased compressor leaves the mean update unchanged and
adds variance, so that a constant rate reaches a neighborhood of the optimum only;
``diana`` and ``ef21`` reach the optimum.

Where this differs from the papers: they compress the gradient, this the update ``-rate
* gradient``, which is the same for a compressor with ``C(r x) = r C(x)``.

Reference: Khirirat, Feyzmahdavian, Johansson, "Distributed learning with compressed
gradients", 2018, arXiv:1806.06573.
"""

from fedblend.checks import ALGORITHM, gate
from fedblend.compress.compressor import COMPRESSOR, Compressor, decode, encode
from fedblend.core import Algorithm
from fedblend.registry import transform
from fedblend.transforms.wrapping import delta_of, needs_with, warn_of_feedback


@transform(encodes=True)
@gate(algorithm=ALGORITHM, compressor=COMPRESSOR)
def compressed(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """The wrapped algorithm with compressed updates.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        compressor: compressor of every client's ``delta``; see ``fedblend.compress``.
    """
    warn_of_feedback(algorithm.needs.feedback, compressor.name, "compressed")

    def client(down, client, shard, key):
        up, client = algorithm.client(down, client, shard, key)
        delta = encode(compressor, delta_of(up, "compressed"), key, shard, "compress")
        return up._replace(delta=delta), client

    def undo(up, sender):
        delta = decode(compressor, up.delta, sender.key, "compress", sender.id)
        return algorithm.wire.decode(up._replace(delta=delta), sender)

    needs = needs_with(compressor.clients, algorithm, "compressed")
    wire = algorithm.wire._replace(decode=undo)
    return algorithm._replace(client=client, wire=wire, needs=needs)
