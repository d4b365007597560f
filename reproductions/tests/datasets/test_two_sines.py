# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients of two sine curves, against what the paper says of them."""

import numpy as np
import pytest

from fedblend.data.dataset import DataError
from fedblend.data.datasets import load
from fedblend.data.partition import by_key, federate_dataset
from fedblend.errors import UserError
from fedblend_reproductions.datasets import two_sines


def test_two_sines():
    dataset = load("two_sines", first=70)
    assert dataset.name == "two_sines(70, 130)"
    assert dataset.rows[0].shape == (10000, 1)
    assert dataset.test_rows is not None
    assert dataset.test_rows[1].shape == (400000, 1)
    federated_data = federate_dataset(dataset, by_key(dataset.keys), test="official")
    assert federated_data.clients == 200
    assert federated_data.names[:3] == ("0", "1", "2")
    assert federated_data.test is not None
    np.testing.assert_array_equal(federated_data.test.counts, 2000)

    def fit(client):
        """a sin(x + b) is linear in (sin x, cos x): the fit must be exact."""
        assert federated_data.test is not None
        x, y = federated_data.test.rows(client)
        basis = np.concatenate([np.sin(x), np.cos(x)], axis=1)
        best, residual, *_ = np.linalg.lstsq(basis, y, rcond=None)
        assert residual[0] < 1e-6
        return best.ravel()

    np.testing.assert_allclose(fit(0), fit(69), atol=1e-4)
    np.testing.assert_allclose(fit(70), fit(199), atol=1e-4)
    assert np.linalg.norm(fit(0) - fit(70)) > 0.1
    for client in (0, 70):
        assert 0.1 <= np.linalg.norm(fit(client)) <= 5.0


def test_the_seed_decides():
    one, again, other = (two_sines(clients=30, seed=seed).rows[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first": 201}, r"first: 201 is not in 0\.\.200"),
        ({"points": 0}, "points: 0 is not a whole number"),
        ({"amplitudes": (2.0, 1.0)}, "is not a range"),
    ],
)
def test_errors_are_one_clear_line(options, message):
    with pytest.raises((DataError, UserError), match=message) as error:
        two_sines(**options)
    assert "\n" not in str(error.value)
