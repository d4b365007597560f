# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Datasets read from public files, against facts their authors publish."""

import bz2
import gzip
import json

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.datasets import (
    femnist,
    femnist_from_leaf,
    libsvm,
    load,
    mnist,
)
from fedblend.data.partition import by_key, contiguous, federate_dataset
from fedblend.errors import UserError


def test_mnist(needs):
    needs("mnist", "mnist_writers")
    dataset = load("mnist", writers=True)
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


def test_fashion_mnist(needs):
    needs("fashion_mnist")
    dataset = load("fashion_mnist")
    inputs, labels = dataset.rows
    assert inputs.shape == (60000, 28, 28, 1)
    np.testing.assert_allclose(inputs.mean(), 0.28604, atol=1e-5)
    np.testing.assert_allclose(inputs.std(), 0.35302, atol=1e-5)
    assert np.bincount(labels).tolist() == [6000] * 10
    assert dataset.label_names[labels[0]] == "Ankle boot"
    assert dataset.test_rows is not None
    assert np.bincount(dataset.test_rows[1]).tolist() == [1000] * 10


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


@pytest.mark.parametrize(
    ("name", "rows", "features", "positive", "labels"),
    [
        ("a6a", 11220, 122, 2692, ("-1", "1")),
        ("ijcnn1", 49990, 22, 4853, ("-1", "1")),
        ("mushrooms", 8124, 112, 4208, ("1", "2")),
        ("w6a", 17188, 300, 525, ("-1", "1")),
    ],
)
def test_libsvm(needs, name, rows, features, positive, labels):
    needs(name)
    dataset = load(name)
    assert dataset.rows[0].shape == (rows, features)
    assert dataset.rows[1].sum() == positive
    assert dataset.label_names == labels
    assert dataset.kind == "binary"


def test_ijcnn1_has_the_known_optimum(needs):
    """Regularized logistic regression, 8 contiguous clients of equal weight.

    The value, .435629, was computed apart from this code for FLIX at alpha = 1.
    """
    needs("ijcnn1")
    inputs, targets = libsvm("ijcnn1", intercept=True, dtype="float64").rows
    signed = inputs * (2.0 * targets - 1)[:, None]
    partition = contiguous(len(inputs), 8)
    weights = np.repeat(1 / (8 * partition.counts), partition.counts)
    x = np.zeros(23)
    for _ in range(10):  # Newton's method
        chance = 1 / (1 + np.exp(signed @ x))
        gradient = 0.1 * x - signed.T @ (weights * chance)
        curve = (signed.T * (weights * chance * (1 - chance))) @ signed
        x -= np.linalg.solve(curve + 0.1 * np.eye(23), gradient)
    loss = weights @ np.logaddexp(0, -signed @ x) + 0.05 * x @ x
    np.testing.assert_allclose(loss, 0.435629, atol=5e-7)


def test_libsvm_of_ones_own(tmp_path):
    text = b"+1 1:0.5 3:-2 # a comment\n\n-1\n+1 2:1e-3\n"
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.bz2").write_bytes(bz2.compress(text))
    expected = [[0.5, 0, -2, 1], [0, 0, 0, 1], [0, 1e-3, 0, 1]]
    for name in ("a.txt", "a.bz2"):
        dataset = load("libsvm", name=str(tmp_path / name), intercept=True)
        np.testing.assert_allclose(dataset.rows[0], expected, rtol=1e-6)
        assert dataset.rows[1].tolist() == [1, 0, 1]
        assert dataset.name == "a"
    assert libsvm(str(tmp_path / "a.txt"), features=5).rows[0].shape == (3, 5)
    with pytest.raises(DataError, match="n_features was set to 2, but"):
        libsvm(str(tmp_path / "a.txt"), features=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "there are no rows"),
        (b"1 1:1\n1 2:1\n", "1 different labels; exactly 2"),
        (b"1 1:1\n2 1:1\n3 1:1\n", "3 different labels"),
        (b"1 a:1\n2 1:1\n", "is not LIBSVM text"),
        (b"1 1:1 2\n2 1:1\n", "is not LIBSVM text, lines of label"),
        (b"1 0:1\n2 1:1\n", "lines of label .* Invalid index 0 in"),
    ],
)
def test_libsvm_errors(tmp_path, text, message):
    path = tmp_path / "a.txt"
    path.write_bytes(text)
    with pytest.raises(DataError, match=message) as error:
        libsvm(str(path))
    assert "\n" not in str(error.value)


def test_libsvm_options(tmp_path):
    with pytest.raises(DataError, match="neither a file nor one of a6a, ijcnn1"):
        libsvm("a9a")
    with pytest.raises(UserError, match="dtype: 'int8'"):
        libsvm("a6a", dtype="int8")
    (tmp_path / "a.bz2").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="is not LIBSVM text"):
        libsvm(str(tmp_path / "a.bz2"))


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


def test_leaf(home):
    """LEAF's own format, two writers, becomes the .npz that is read."""
    image = (np.arange(784) % 256 / 255).tolist()
    for part, labels in (("train", [3, 61]), ("test", [10])):
        (home / part).mkdir()
        data = {"x": [image] * len(labels), "y": labels}
        users = {
            "users": ["f1_01", "f0_02"],
            "user_data": {"f1_01": data, "f0_02": data},
        }
        (home / part / "all_data.json").write_text(json.dumps(users))
    femnist_from_leaf(home, home / "mine.npz")
    dataset = femnist(file=str(home / "mine.npz"))
    assert dataset.keys is not None
    assert dataset.keys.tolist() == ["f1_01", "f1_01", "f0_02", "f0_02"]
    assert dataset.rows[1].tolist() == [3, 61, 3, 61]
    np.testing.assert_allclose(dataset.rows[0][0].ravel(), image, atol=1e-6)
    assert dataset.test_rows is not None
    assert dataset.test_rows[1].tolist() == [10, 10]
    with pytest.raises(MissingDataError, match=r"no \.json files in"):
        femnist_from_leaf(home / "nowhere", home / "mine.npz")
    with pytest.raises(DataError, match=r"not an \.npz of LEAF's images"):
        np.savez(home / "other.npz", a=np.arange(3))
        femnist(file=str(home / "other.npz"))
