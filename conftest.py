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
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    # One folder of compiled programs for all workers of a session and for what they
    # start; the first process makes it, before it starts the others.
    compiled = tempfile.mkdtemp(prefix="fedblend-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
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
