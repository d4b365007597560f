# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The bound's alpha beside tuned ones."""

import numpy as np
import pytest

from fedblend_reproductions.apfl import bound, bound_runs, tables


def test_ranks_with_ties():
    left = np.array([0.0, 0.0, 1.0, 2.0])
    assert tables.rank_correlation(left, -left) == pytest.approx(-1)
    assert tables.rank_correlation(left, np.ones(4)) == 0
    # By hand: ranks (1.5, 1.5, 3, 4) and (1, 2, 3, 4).
    expected = np.corrcoef([1.5, 1.5, 3, 4], [1, 2, 3, 4])[0, 1]
    found = tables.rank_correlation(left, np.array([3.0, 4.0, 5.0, 6.0]))
    assert found == pytest.approx(expected)


@pytest.mark.slow
def test_the_bound_shares_more_the_less_it_trusts_few_rows(tmp_path, data_home):
    found = bound.check(True, tmp_path).numbers["found"]["Dirichlet(1)"]
    alphas = [found["alpha"][rule] for rule in bound_runs.BOUNDS]
    assert alphas == sorted(alphas) and alphas[-1] > alphas[0] + 0.2
    assert found["accuracy"][bound_runs.OWN] > found["accuracy"]["alone"]
    assert found["behind"][bound_runs.OWN] == (0.0, 0.0)
