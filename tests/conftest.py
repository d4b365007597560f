"""Settings for all tests: shapes never broadcast by accident."""

import os
import signal

# Nearly all of the time goes into compiling small programs once: without XLA's costlier
# passes the tests take a quarter less. JAX_DISABLE_MOST_OPTIMIZATIONS=0 has them back.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

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
