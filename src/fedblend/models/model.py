# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A model is a pair of functions: ``init`` makes parameters, ``apply`` uses them.

Any such pair serves everywhere in the library; nothing else is asked of a model. What
the ones that ship have in common:

*Inputs* have the rows first. They may come in any trailing shape with the right number
of entries (an image, or the same image flattened) and in any dtype: the computation
follows the dtype of the parameters.

*Parameters* are named tuples of arrays, of the ``dtype`` given to the builder.

*Nothing is random after init, and no row sees another*: no dropout, no normalization by
batch statistics, whose running means are neither a parameter to mix nor to average.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from fedblend.checks import COUNT
from fedblend.core import Key, PyTree
from fedblend.mixing import Apply


class Model(NamedTuple):
    """``init(key) -> params`` and ``apply(params, inputs) -> outputs``."""

    init: Callable[[Key], PyTree]
    apply: Apply


def require_positive(model: str, **sizes: int) -> None:
    """Refuse what is no size, by its name."""
    for name, size in sizes.items():
        COUNT(f"{model}: {name}", size)


def flat_size(shape: tuple[int, ...]) -> int:
    """The number of entries of one row of inputs."""
    return math.prod(shape)
