# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients add the server's gradient to some parameters only.

Wraps an algorithm whose server sends a gradient of its own loss as ``down.correction``,
which clients add to their own gradients. That loss may depend on a part of the model,
such as a penalty on embeddings; its gradient in all other parameters is zero::

    server    sends correction[name] for the named parameters
    client i  correction[other] <- 0, and runs the wrapped algorithm

The run is the wrapped one, with fewer bits down.

Where this differs from Mixed FL (Augenstein et al., 2022, arXiv:2205.13655), which
sends the whole gradient: nothing but the bits.
"""

from collections.abc import Sequence

import jax

from fedblend import trees
from fedblend.core import Algorithm, Down


def partial_correction(algorithm: Algorithm, names: Sequence[str]) -> Algorithm:
    """The wrapped algorithm, whose server sends its gradient of these parameters alone.

    Args:
        algorithm: one whose correction is zero in all other parameters, such as
            ``mixed_fl`` with a loss of these; ``fedselect`` goes around this transform.
        names: paths of parameters, such as "embedding" or "last/weight".
    """

    def shorten(down: Down) -> Down:
        if down.correction is None:
            return down
        known = trees.leaves_by_path(down.correction)
        for name in names:
            if name not in known:
                raise ValueError(
                    f"partial_correction: no parameter {name!r}, there are "
                    f"{', '.join(map(repr, known))}"
                )
        some = [leaf if name in names else None for name, leaf in known.items()]
        structure = jax.tree.structure(down.correction)
        return down._replace(correction=jax.tree.unflatten(structure, some))

    def complete(down: Down) -> Down:
        if down.correction is None:
            return down
        zeros = trees.zeros_like(down.shared)
        return down._replace(correction=trees.fill(down.correction, zeros))

    return algorithm._replace(
        client=lambda down, *rest: algorithm.client(complete(down), *rest),
        personal=lambda down, *rest: algorithm.personal(complete(down), *rest),
        wire=algorithm.wire._replace(
            tell=lambda down, request: shorten(algorithm.wire.tell(down, request))
        ),
    )
