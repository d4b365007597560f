# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Most tests of ``auto`` compare linear models only: networks take most of the time."""

import pytest

from fedblend.runs.auto import candidates, comparison


@pytest.fixture(autouse=True, scope="package")
def compared():
    """The methods that are compared, as a list that a test may change."""
    with pytest.MonkeyPatch.context() as patch:
        linear = [one for one in candidates.CANDIDATES if one.model == "linear"]
        patch.setattr(comparison, "CANDIDATES", linear)
        yield
