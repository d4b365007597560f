# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What was compiled once is not compiled again, in another process either."""

import os
from pathlib import Path

import jax


def compile_cache(folder: str | Path | None = None) -> Path | None:
    """Keep what JAX compiles in a folder, for this and later processes.

    Call it before the first run. The commands of ``fedblend`` do; a folder that JAX was
    given already (``JAX_COMPILATION_CACHE_DIR``) stays. On a GPU the folder also has
    what XLA found out by timing kernels, so a later run chooses the same ones.

    Args:
        folder: where; by default ``fedblend/jax`` in the user's cache.

    Returns:
        The folder in use, or None where none can be written.
    """
    there = jax.config.jax_compilation_cache_dir  # pyright: ignore
    if there is not None:
        return Path(there)
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(home) if home else Path.home() / ".cache") / "fedblend" / "jax"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # A run begins with many small programs; together they take as long as a large one.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(folder)
