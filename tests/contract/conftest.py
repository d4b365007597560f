# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that were compiled once are not compiled again in the same session.

Most checks of a case differ in data, key, store or number of rounds only, which are no
part of the compiled program.
"""

import os

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory):
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = tmp_path_factory.mktemp("compiled")
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
