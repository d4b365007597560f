# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Problems of which everything is known, and the real ones where they are."""

import pytest
from flix_by_hand import Case, logistic_case, quadratic_case
from threadpoolctl import threadpool_limits

from fedblend.data.download import data_home, public_set


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Matrices are small here: on a busy machine threads only wait for each other."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="session")
def quadratic() -> Case:
    return quadratic_case()


@pytest.fixture(scope="session")
def real():
    """A function from a name to a problem; skips where its file is missing."""
    known: dict[tuple[str, int], Case] = {}

    def case(name: str, clients: int) -> Case:
        if not public_set(name).usable:
            pytest.skip(f"{name} is not in {data_home()}; see FEDBLEND_DATA")
        if (name, clients) not in known:
            known[name, clients] = logistic_case(name, clients)
        return known[name, clients]

    return case
