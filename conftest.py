"""Settings for all tests: shapes never broadcast by accident."""

import atexit
import gc
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
# One device for all tests but those of devices: two workers fill two cores.
os.environ.setdefault("FEDBLEND_DEVICES", "1")
import jax
import pytest
from jax._src import lru_cache

# Fixtures for the suites of all distributions.
pytest_plugins = ["shared_fixtures"]


def put_whole(cache, key: str, value: bytes) -> None:
    """Store a program so that no other process reads half of it, as JAX's own would."""
    path = cache.path / f"{key}-cache"
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_bytes(value)
    os.replace(beside, path)


# Traced programs are many small objects that stay: looking through them for garbage
# after every 700 new ones takes a tenth of the time.
gc.set_threshold(50_000, 20, 100)
jax.config.update("jax_numpy_rank_promotion", "raise")
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    # One folder of compiled programs for all workers: many tests differ in data, key,
    # store or number of rounds only, which are no part of a program. The first process
    # makes it, and workers inherit its name.
    if "FEDBLEND_TEST_PROGRAMS" not in os.environ:
        compiled = tempfile.mkdtemp(prefix="fedblend-compiled-")
        atexit.register(shutil.rmtree, compiled, ignore_errors=True)
        os.environ["FEDBLEND_TEST_PROGRAMS"] = compiled
    jax.config.update("jax_compilation_cache_dir", os.environ["FEDBLEND_TEST_PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    lru_cache.LRUCache.put = put_whole
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
