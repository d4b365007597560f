# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Problems of which everything is known, and the real ones where they are."""

import pytest
from threadpoolctl import threadpool_limits

from flix_by_hand import quadratic, real  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Matrices are small here: on a busy machine threads only wait for each other."""
    with threadpool_limits(1):
        yield
