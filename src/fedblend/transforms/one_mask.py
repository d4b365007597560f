# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One mask for all clients: they send the same random entries of their updates.

Wraps an algorithm. The server sends a seed with every message, from which all clients
draw the same k entries; ``how`` says what is compressed, updates or, in DIANA,
differences to memories::

    delta_i <- the wrapped algorithm's update at client i
    delta   <- mean of C(delta_i) = C(mean delta_i)      the same C for all clients

C is linear, so that clients together are one client that compresses their mean: the
sum of what they send is all that the server needs, and secure sums can hide the rest.
Where updates are gradients, the mean vanishes at the optimum and so does the error:
also without memories a constant rate reaches the optimum, if all clients take part.
The error of the mean is ``omega |mean delta_i|^2``, instead of ``omega/n mean
|delta_i|^2`` with entries of each client's own: n times as much where all clients
agree, less where their updates cancel.

Where this differs from the paper: both compress by a linear map that all clients have
in common. The paper's is a sketch by hash tables, of which the server keeps the largest
entries, with momentum and the error of earlier rounds in the sketch. Here the map keeps
random entries, an unbiased estimate, and the server's step is that of the wrapped
algorithm.

Reference: Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora,
"FetchSGD: communication-efficient federated learning with sketching", ICML 2020,
arXiv:2007.07682.
"""

from collections.abc import Callable

from fedblend.checks import ALGORITHM, FUNCTION, gate
from fedblend.compress import one_mask as masks
from fedblend.compress.compressor import COMPRESSOR, Compressor
from fedblend.core import Algorithm
from fedblend.errors import UserError
from fedblend.registry import transform
from fedblend.transforms.compressed import compressed
from fedblend.transforms.wrapping import with_common_seed, without_warning


@transform(encodes=True)
@gate(algorithm=ALGORITHM, compressor=COMPRESSOR, how=FUNCTION)
def one_mask(
    algorithm: Algorithm,
    compressor: Compressor,
    *,
    how: Callable[[Algorithm, Compressor], Algorithm] = compressed,
) -> Algorithm:
    """The wrapped algorithm with updates of the same entries at all clients.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        compressor: ``rand_k`` with one k and without ``places="sent"``.
        how: the transform that compresses, ``compressed`` or ``diana``.
    """
    if not compressor.masks:
        allowed = 'rand_k with one k for all, and places that are not "sent"'
        raise UserError("one_mask: compressor", compressor, allowed, compressor.name)
    inner = without_warning(algorithm)
    return with_common_seed(
        how(algorithm, compressor),
        lambda seed: how(inner, masks.at(compressor, seed)),
        masks.NAME,
    )
