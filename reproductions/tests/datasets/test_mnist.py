# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""MNIST, against facts its authors publish; files that are missing or damaged."""

import gzip

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.datasets import load
from fedblend.data.partition import by_key, federate_dataset
from fedblend_reproductions.datasets import mnist


def test_mnist(needs):
    needs("mnist", "mnist_writers")
    dataset = load("mnist_writers")
    inputs, labels = dataset.rows
    assert inputs.shape == (60000, 28, 28, 1)
    assert inputs.dtype == np.float32
    assert labels.dtype == np.int32
    np.testing.assert_allclose(inputs.mean(), 0.13066, atol=1e-5)
    np.testing.assert_allclose(inputs.std(), 0.30811, atol=1e-5)
    assert np.bincount(labels)[:3].tolist() == [5923, 6742, 5958]
    assert dataset.test_rows is not None
    assert dataset.test_rows[0].shape == (10000, 28, 28, 1)
    assert dataset.keys is not None
    assert dataset.test_keys is not None
    assert len(np.unique(dataset.keys)) == 539
    assert len(np.unique(dataset.test_keys)) == 297
    assert not np.isin(dataset.test_keys, dataset.keys).any()
    partition = by_key(dataset.keys)
    assert (partition.counts.min(), partition.counts.max()) == (19, 131)
    federated_data = federate_dataset(dataset, partition, test="official")
    assert federated_data.test is not None
    assert federated_data.test.total == 10000


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    return tmp_path


def test_missing_and_damaged_files(home):
    for name in ("mnist", "femnist", "a6a"):
        with pytest.raises(MissingDataError, match=f"^{name}: .* is not in ") as error:
            load(name)
        assert "\n" not in str(error.value)
    (home / "mnist").mkdir()
    path = home / "mnist" / "train-images-idx3-ubyte.gz"
    for content in (b"", b"nonsense", gzip.compress(b"nonsense and more nonsense")):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a complete gzipped idx file"):
            mnist()
