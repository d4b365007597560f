# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One rule for every random draw: a key is (seed, purpose, round, client id).

Keys come from numbers, never from a generator that moves on, so a draw depends on
nothing but these four: not on the place of a client in the cohort, not on who else
takes part, not on where a run was interrupted. Both runtimes use this rule.

A transform hands the wrapped function its key untouched and folds its own with
``named``, so that wrapping with the identity is exactly the same run.
"""

import zlib

import jax
import numpy as np

from fedblend.core import Key


def named(key: Key, purpose: str) -> Key:
    """The key for one purpose; the name itself is the number."""
    return jax.random.fold_in(key, np.uint32(zlib.crc32(purpose.encode())))


def derive(
    root: Key, purpose: str, round: int | jax.Array = 0, client: int | jax.Array = 0
) -> Key:
    """The key of (root, purpose, round, client id)."""
    key = named(root, purpose)
    return jax.random.fold_in(jax.random.fold_in(key, round), client)
