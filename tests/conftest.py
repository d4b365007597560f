"""Settings for all tests: shapes never broadcast by accident."""

import os

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def data_home() -> str:
    """The folder with public datasets, or a skip where there is none."""
    home = os.environ.get("FEDBLEND_DATA", "")
    if not os.path.isdir(home):
        pytest.skip("FEDBLEND_DATA names no folder with the public datasets")
    return home
