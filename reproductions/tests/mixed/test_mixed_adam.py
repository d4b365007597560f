# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL with Adam, and personal models under Mixed FL."""

import numpy as np
import pytest

from fedblend_reproductions.mixed import adam, blend, faces
from fedblend_reproductions.mixed.task import Curves, mixed_fl
from fedblend_reproductions.mixed.tuning import _halves, beyond


def test_one_curve_beyond_another():
    one, other = (
        Curves(np.arange(3), {"loss": np.array([[9, a, b], [9, b, b]])})
        for a, b in ((2.0, 4.0), (1.0, 1.0))
    )
    # Seeds are 3 and 4 in the mean over rounds, beside 1 and 1.
    assert beyond(one, other) == (2.5, 0.5)


@pytest.mark.slow
def test_rates_are_not_chosen_on_what_is_tested_on(data_home):
    this = faces.task(True)
    assert this.federated_data.test is not None
    test = this.federated_data.test.examples
    halves = _halves(this, mixed_fl(this, "one_way"))
    parts = [half.federated_data.splits["test"].rows(0) for half in halves]
    assert sum(len(part[1]) for part in parts) == len(test[1])
    np.testing.assert_array_equal(parts[0][0], test[0][::2])
    np.testing.assert_array_equal(parts[1][0], test[0][1::2])


@pytest.mark.slow
def test_adam_on_one_side_alone_misses_the_mixture():
    found = adam.distances()
    assert max(found["one_way, server"], found["parallel, merge"]) < adam.EXACT
    assert found["parallel, clients only"] > adam.APART


@pytest.mark.slow
def test_adam_under_one_way(data_home):
    finding = adam.check(True)
    assert finding.numbers["holds"]["Adam on the whole keeps the optimum"]
    last = {
        name: values["auc"][:, -1].mean()
        for name, values in finding.numbers["curves"].items()
    }
    assert min(last.values()) > 0.6
    assert set(finding.figures) == {"adam"}


@pytest.mark.slow
def test_the_blend(data_home):
    finding = blend.check(True)
    assert all(finding.numbers["holds"].values()), finding.numbers["holds"]
    own = finding.numbers["accuracies"]["flix"]["blend"]["own rows, deployed"]
    assert own[:, 0].mean() > own[:, 1].mean() + 0.05
    assert set(finding.figures) == {"alphas"}
