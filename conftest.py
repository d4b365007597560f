"""Settings for all tests: shapes never broadcast by accident."""

import atexit
import os
import shutil
import signal
import tempfile

# Most of the time goes into compiling small programs that run once. Without XLA's
# costlier passes, and with its older and plainer code for fused loops, that takes half
# as long. JAX_DISABLE_MOST_OPTIMIZATIONS=0 with
# XLA_FLAGS=--xla_cpu_use_fusion_emitters=true has the programs that users run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    # A folder of compiled programs for each worker: many tests differ in data, key,
    # store or number of rounds only, which are no part of a program. Workers do not
    # share it, since one may read what another has half written.
    compiled = tempfile.mkdtemp(prefix="fedblend-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start what runs in the background deaf to Ctrl-C, and so would be all
    # programs that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data_home() -> str:
    """The folder with public datasets, or a skip where there is none."""
    home = os.environ.get("FEDBLEND_DATA", "")
    if not os.path.isdir(home):
        pytest.skip("FEDBLEND_DATA names no folder with the public datasets")
    return home
