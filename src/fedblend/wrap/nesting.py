# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What may stand inside an encoding wrapper: checked when it is traced."""

from fedblend.compress.compressor import Encoded
from fedblend.core import PyTree, Up


def delta_of(up: Up, wrapper: str) -> PyTree:
    """What a client says, or one clear line if there is nothing to encode."""
    if up.delta is None:
        raise ValueError(f"{wrapper}: the wrapped algorithm's clients say nothing")
    if isinstance(up.delta, Encoded):
        raise ValueError(
            f"{wrapper}: what the wrapped algorithm says is encoded already; only one "
            "of compressed, diana and ef21, outermost"
        )
    return up.delta
