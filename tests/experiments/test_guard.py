# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The alphas that a configuration gets from averages of arms."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from fedblend.experiments.guard import alphas_of


def test_an_alpha_is_the_mean_by_weights_without_training_alone():
    found: Any = SimpleNamespace(
        names=("alone", "0", "0.5", "1"),
        weights=np.array([[0.2, 0, 0.4, 0.4], [0.5, 0, 0, 0.5], [0, 0, 1, 0]]),
        chosen=np.array([2, 0, 2]),
    )
    np.testing.assert_allclose(alphas_of(found), [0.75, 0, 0.5])
