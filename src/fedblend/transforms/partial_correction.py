# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A correction of some parameters alone: what is zero anyway is not sent.

A loss of the server's own may depend on a part of the model, such as a penalty of
embeddings. Its gradient in all other parameters is zero; here it does not travel, and
clients put the zeros back.
"""

from collections.abc import Sequence

import jax

from fedblend import trees
from fedblend.checks import ALGORITHM, gate
from fedblend.core import Algorithm, Down
from fedblend.transforms.sparse_rows import named


@gate(algorithm=ALGORITHM)
def partial_correction(algorithm: Algorithm, names: Sequence[str]) -> Algorithm:
    """The wrapped algorithm, whose correction is told of these parameters alone.

    Args:
        algorithm: one whose correction is zero in all other parameters, such as
            ``mixed`` with a function of these; ``select`` goes around this.
        names: paths of parameters, such as "embedding" or "last/weight".
    """

    def shorten(down: Down) -> Down:
        if down.correction is None:
            return down
        known = named(down.correction)
        for name in names:
            if name not in known:
                raise ValueError(
                    f"nudge_only: no parameter {name!r}, there are "
                    f"{', '.join(map(repr, known))}"
                )
        kept = [leaf if name in names else None for name, leaf in known.items()]
        structure = jax.tree.structure(down.correction)
        return down._replace(correction=jax.tree.unflatten(structure, kept))

    def complete(down: Down) -> Down:
        if down.correction is None:
            return down
        zeros = trees.zeros_like(down.shared)
        return down._replace(correction=trees.fill(down.correction, zeros))

    return algorithm._replace(
        client=lambda down, *rest: algorithm.client(complete(down), *rest),
        personal=lambda down, *rest: algorithm.personal(complete(down), *rest),
        tell=lambda down, request: shorten(algorithm.tell(down, request)),
    )
