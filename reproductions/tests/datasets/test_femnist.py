# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FEMNIST, against facts its authors publish, and LEAF's own format."""

import json

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.datasets import load
from fedblend.data.partition import by_key, federate_dataset
from fedblend_reproductions.datasets import femnist, femnist_from_leaf


def test_femnist(needs):
    needs("femnist")
    dataset = load("femnist")
    assert dataset.rows[0].shape == (41495, 28, 28, 1)
    assert dataset.test_rows is not None
    assert len(dataset.test_rows[1]) == 4763
    assert dataset.outputs == len(dataset.label_names) == 62
    assert dataset.rows[0][:, 0, 0].mean() > 0.9  # paper is 1
    assert dataset.keys is not None
    partition = by_key(dataset.keys)
    assert len(partition) == 300
    federated_data = federate_dataset(dataset, partition, test="official")
    assert federated_data.test is not None
    assert federated_data.test.total == 4763
    digits = load("femnist", digits_only=True)
    assert digits.test_rows is not None
    assert len(digits.rows[1]) + len(digits.test_rows[1]) == 32630
    assert digits.outputs == 10


def test_leaf(tmp_path):
    """LEAF's own format, two writers, becomes the .npz that is read."""
    image = (np.arange(784) % 256 / 255).tolist()
    for part, labels in (("train", [3, 61]), ("test", [10])):
        (tmp_path / part).mkdir()
        data = {"x": [image] * len(labels), "y": labels}
        users = {
            "users": ["f1_01", "f0_02"],
            "user_data": {"f1_01": data, "f0_02": data},
        }
        (tmp_path / part / "all_data.json").write_text(json.dumps(users))
    femnist_from_leaf(tmp_path, tmp_path / "mine.npz")
    dataset = femnist(file=str(tmp_path / "mine.npz"))
    assert dataset.keys is not None
    assert dataset.keys.tolist() == ["f1_01", "f1_01", "f0_02", "f0_02"]
    assert dataset.rows[1].tolist() == [3, 61, 3, 61]
    np.testing.assert_allclose(dataset.rows[0][0].ravel(), image, atol=1e-6)
    assert dataset.test_rows is not None
    assert dataset.test_rows[1].tolist() == [10, 10]
    with pytest.raises(MissingDataError, match=r"no \.json files in"):
        femnist_from_leaf(tmp_path / "nowhere", tmp_path / "mine.npz")
    with pytest.raises(DataError, match=r"not an \.npz of LEAF's images"):
        np.savez(tmp_path / "other.npz", a=np.arange(3))
        femnist(file=str(tmp_path / "other.npz"))
