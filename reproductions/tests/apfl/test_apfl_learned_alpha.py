# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Alpha learned on synthetic sets."""

import pytest

from fedblend_reproductions.apfl import learned_alpha


@pytest.mark.slow
def test_alpha_leaves_the_shared_model_where_clients_differ(tmp_path):
    found = learned_alpha.check(True, tmp_path).numbers
    name = "synthetic(0, 0), gamma by class"
    assert found["alphas"][name][learned_alpha.OURS]["mean"] < 0.6
    lead, error = found["found"]["gamma by class"]["apfl_minus_localized_fedavg"][0]
    assert lead > error > 0
