# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The width of numbers."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """Compute with "float32" or "float64" inside of a ``with`` block."""
    before = jax.config.jax_enable_x64  # pyright: ignore
    jax.config.update("jax_enable_x64", name == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
