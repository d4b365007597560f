# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Losses against diversity."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.core import Batch
from fedblend.losses import gradient
from fedblend_reproductions.apfl import diversity


def test_minimizers_are_minimizers():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 6)).astype(np.float32), rng.integers(0, 10, 40)
    found = diversity.minimizer(rows, np.full(40, 1 / 40))
    model = fb.models.softmax(6, 10)
    loss = fb.losses.l2(fb.losses.cross_entropy(model.apply), diversity.L2)
    here = model.init(jax.random.key(0))._replace(
        **{name: np.float32(part) for name, part in found._asdict().items()}
    )
    found = gradient(loss)(here, Batch(rows))
    assert max(np.abs(part).max() for part in found) < 2e-4


@pytest.mark.slow
def test_shared_models_suffer_from_diversity_and_personal_ones_do_not(
    tmp_path, data_home
):
    found = diversity.check(True, tmp_path).numbers
    assert found["holds"]["diversity grows"]
    assert found["rises"]["FedAvg"] > 0.1
    assert found["rises"][diversity.OURS] < -0.1
