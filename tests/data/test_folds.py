# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""K folds of every client's rows, against sets of rows."""

import numpy as np
import pytest

import fedblend as fb
from fedblend.data.federated import side_by_side

COUNTS = [9, 2, 20]


def federated_data() -> fb.FederatedData:
    rows = np.arange(sum(COUNTS)), np.arange(sum(COUNTS)) * 10
    parts = np.split(np.arange(sum(COUNTS)), np.cumsum(COUNTS)[:-1])
    return fb.federate(rows, parts, validation=0.2, test=0.2)


def test_every_fold_trains_on_all_rows_but_its_own():
    data = federated_data()
    found = fb.data.folds(data, 3)
    assert found[0].test is None
    for client, count in enumerate(data.train.counts):
        own = set(data.train.rows(client)[0].tolist())
        held = []
        for fold in found:
            assert fold.validation is not None
            train, valid = (
                split.rows(client)[0].tolist()
                for split in (fold.train, fold.validation)
            )
            assert len(train) + len(valid) == count
            assert set(train) | set(valid) == own
            held += valid
        assert len(held) == len(set(held)) == 3 * (count // 3)
        inputs, targets = found[0].train.rows(client)
        np.testing.assert_array_equal(targets, inputs * 10)


def test_folds_share_their_arrays():
    """Side by side they are as large as one of them: all rows twice."""
    data = federated_data()
    found = fb.data.folds(data, 3)
    joined = side_by_side([found[0], found[1], found[0], found[2]])
    assert len(joined["train"].examples[0]) == 2 * data.train.total
    for place, fold in enumerate((0, 1, 0, 2)):
        start, count = joined["train"].starts[place, 2], joined["train"].counts[2]
        rows = joined["train"].examples[0][start : start + count]
        np.testing.assert_array_equal(rows, found[fold].train.rows(2)[0])


def test_one_fold_is_none():
    with pytest.raises(ValueError, match="number: 1 is not"):
        fb.data.folds(federated_data(), 1)


@pytest.mark.parametrize("some", [[0, 1, 2], [2, 0]], ids=["all", "selected"])
def test_rows_of_several_splits_keep_their_numbers(some):
    """The rows are their own numbers; client 1 has fewer test rows than the others."""
    parts = np.split(np.random.default_rng(0).permutation(70), [30, 40])
    every = [
        fb.federate(np.arange(70), parts, test=0.2, split=split).select(some)
        for split in (0, 1, 2)
    ]
    clients = np.arange(len(some))[::-1]
    for datasets in (every, every[:1]):
        joined = side_by_side(datasets)["test"]
        numbers = joined.numbers(clients)
        assert numbers.shape == (len(datasets), len(some), 6)
        for found, data in zip(numbers, datasets, strict=True):
            assert data.test is not None
            for own, client in zip(found, clients, strict=True):
                expected = data.test.rows(client)
                np.testing.assert_array_equal(own[: len(expected)], expected)
