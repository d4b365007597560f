# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""LIBSVM's text format and four of its datasets, against published facts."""

import bz2

import numpy as np
import pytest

from fedblend.data.dataset import DataError
from fedblend.data.datasets import load
from fedblend.data.partition import contiguous
from fedblend.errors import UserError
from fedblend_reproductions.datasets import libsvm


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
