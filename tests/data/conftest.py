# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Public files are tested where they are: export FEDBLEND_DATA, or get them."""

from collections.abc import Callable

import pytest

from fedblend.data.download import status


@pytest.fixture
def needs() -> Callable[..., None]:
    """Skip a test whose public files are not on this machine."""

    def check(*names: str) -> None:
        for name in names:
            state = status(name)
            if not state.usable:
                pytest.skip(f"{name} is not in {state.folder}; see FEDBLEND_DATA")

    return check
