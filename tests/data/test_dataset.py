# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Datasets: what is refused, and how they become federations."""

import numpy as np
import pytest

from fedblend.data.dataset import DataError, Dataset, check, generator
from fedblend.data.partition import (
    Partition,
    by_key,
    classes_per_client,
    contiguous,
    federate_dataset,
    iid,
)
from fedblend.data.variants import one_class_clients
from fedblend.errors import InputError
from fedblend.extras import require


def classes(rows=60, test=30, **fields):
    """Rows that carry their own number as input."""
    inputs = np.arange(rows, dtype=np.float32)[:, None]
    test_inputs = 1000 + np.arange(test, dtype=np.float32)[:, None]
    return Dataset(
        (inputs, np.arange(rows, dtype=np.int32) % 3),
        "classes",
        3,
        (test_inputs, np.arange(test, dtype=np.int32) % 3),
        **{"name": "toy", **fields},
    )


GOOD = classes()
INPUTS, TARGETS = GOOD.rows
HOLED = INPUTS.copy()
HOLED[7, 0] = np.nan


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (GOOD._replace(rows=(INPUTS[:0], TARGETS[:0])), "toy: there are no rows"),
        (GOOD._replace(rows=(INPUTS, TARGETS[:5])), "60 rows .* 5 targets"),
        (GOOD._replace(keys=TARGETS[:4]), "60 rows .* 4 client keys"),
        (GOOD._replace(rows=(HOLED, TARGETS)), "inputs: row 7 .* column 0 is nan"),
        (
            GOOD._replace(rows=(HOLED, TARGETS), columns=("age",)),
            "row 7 .* column 'age' is nan",
        ),
        (
            GOOD._replace(rows=(INPUTS, HOLED[:, 0]), kind="regression"),
            r"targets: row 7 \(counted from 0\) is nan",
        ),
        (GOOD._replace(test_rows=(HOLED[:30], TARGETS[:30])), r"toy \(test\): inputs"),
        (GOOD._replace(rows=(INPUTS, 0 * TARGETS)), "all 60 targets are 0; at least 2"),
        (GOOD._replace(rows=(INPUTS, TARGETS + 1)), r"target 3 in row 2 .* 0\.\.2"),
        (GOOD._replace(kind="binary"), r"target 2 in row 2 .* 0\.\.1"),
        (GOOD._replace(rows=(INPUTS, TARGETS / 2)), "one integer a row, not float64"),
        (GOOD._replace(kind="ranking"), "kind: 'ranking' is not one of classes"),
    ],
)
def test_check_refuses_in_one_line(dataset, message):
    with pytest.raises(DataError, match=message) as error:
        check(dataset)
    assert "\n" not in str(error.value)


SEQUENCES = np.arange(24, dtype=np.int32).reshape(4, 6) % 5
TEXT = Dataset((SEQUENCES, SEQUENCES - 1), "sequence", 5, name="text")
TAGS = (SEQUENCES[:, :3] > 2).astype(np.int32)
TAGGED = Dataset((SEQUENCES / 7, TAGS), "tags", 3, name="tagged")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (TEXT._replace(outputs=4), r"text: input 4 in row 0 .* in 0\.\.3"),
        (
            TEXT._replace(rows=(SEQUENCES, SEQUENCES + 1)),
            r"target 5 in row 0 .* 0\.\.4",
        ),
        (TEXT._replace(rows=(SEQUENCES - 1, SEQUENCES)), "input -1 in row 0"),
        (TEXT._replace(rows=(SEQUENCES, TAGS)), r"integers of shape \(4, 6\), not int"),
        (TEXT._replace(rows=(SEQUENCES / 2, SEQUENCES)), "inputs must be integers"),
        (
            TEXT._replace(rows=(SEQUENCES[:, 0], TAGS)),
            "inputs must be integers of shape",
        ),
        (TAGGED._replace(outputs=4), r"targets must be integers of shape \(4, 4\)"),
        (TAGGED._replace(rows=(SEQUENCES, 2 * TAGS)), r"target 2 in row 1 .* 0\.\.1"),
        (TAGGED._replace(rows=(SEQUENCES, TAGS / 2)), "not float64 of shape"),
    ],
)
def test_check_refuses_sequences_and_tags_in_one_line(dataset, message):
    with pytest.raises(DataError, match=message) as error:
        check(dataset)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dataset", [TEXT, TAGGED])
def test_sequences_and_tags_become_federations(dataset):
    check(dataset)
    whole = dataset._replace(test_rows=dataset.rows)
    federated_data = federate_dataset(whole, contiguous(4, 2), test="official")
    assert federated_data.test is not None
    assert federated_data.test.counts.tolist() == [2, 2]
    assert one_class_clients(federated_data) == []


def test_check_accepts():
    check(GOOD)
    check(GOOD._replace(rows=(INPUTS, INPUTS), kind="regression", test_rows=None))


def test_one_class_clients():
    partition = Partition((np.array([0, 3, 6]), np.array([9, 1]), np.array([2])))
    federated_data = federate_dataset(GOOD, partition)
    assert one_class_clients(federated_data) == [0, 2]
    many = federate_dataset(GOOD, iid(60, 25, seed=1))
    labels = [set(many.train.rows(client)[1].tolist()) for client in range(25)]
    alone = [client for client, mine in enumerate(labels) if len(mine) == 1]
    assert 0 < len(alone) < 25
    assert one_class_clients(many) == alone
    real = GOOD._replace(rows=(INPUTS, INPUTS), kind="regression", test_rows=None)
    assert one_class_clients(federate_dataset(real, partition)) == []


def test_fractions_are_taken_from_every_client():
    federated_data = federate_dataset(GOOD, iid(60, 6), validation=0.2, test=0.3)
    assert federated_data.train.counts.tolist() == [5] * 6
    assert federated_data.validation is not None
    assert federated_data.validation.counts.tolist() == [2] * 6
    assert federated_data.test is not None
    assert federated_data.test.counts.tolist() == [3] * 6
    seen = np.concatenate(
        [s.examples[0].ravel() for s in federated_data.splits.values()]
    )
    np.testing.assert_array_equal(np.sort(seen), np.arange(60))


def test_official_rows_follow_the_classes():
    partition = classes_per_client(TARGETS, 9, 2, seed=1)
    federated_data = federate_dataset(GOOD, partition, test="official", seed=3)
    assert federated_data.test is not None
    np.testing.assert_array_equal(
        np.sort(federated_data.test.examples[0].ravel()), 1000 + np.arange(30)
    )
    for client in range(9):
        train = np.bincount(federated_data.train.rows(client)[1], minlength=3)
        test = np.bincount(federated_data.test.rows(client)[1], minlength=3)
        # 20 training and 10 test rows a class: half as many, up to rounding
        assert (np.abs(test - train / 2) <= 1).all()
        assert (test[train == 0] == 0).all()


def test_official_rows_of_classes_nobody_holds_are_left_out():
    partition = Partition((np.flatnonzero(TARGETS == 0), np.flatnonzero(TARGETS == 2)))
    federated_data = federate_dataset(GOOD, partition, test="official")
    assert federated_data.test is not None
    assert federated_data.test.counts.tolist() == [10, 10]


def test_official_rows_go_to_their_natural_client():
    keys = np.array([f"w{row % 4}" for row in range(60)])
    test_keys = np.array([f"w{row % 5}" for row in range(30)])  # w4 is a stranger
    dataset = classes(keys=keys, test_keys=test_keys)
    federated_data = federate_dataset(dataset, by_key(keys), test="official")
    assert federated_data.names == ("w0", "w1", "w2", "w3")
    assert federated_data.test is not None
    for client in range(4):
        rows = federated_data.test.rows(client)[0].ravel() - 1000
        np.testing.assert_array_equal(rows, np.arange(client, 30, 5))
    strangers = dataset._replace(test_keys=np.array(["x"] * 30))
    shared = federate_dataset(strangers, by_key(keys), test="official").test
    assert shared is not None
    assert shared.total == 30


def test_official_rows_of_a_regression_follow_the_counts():
    dataset = GOOD._replace(
        kind="regression", rows=(INPUTS, INPUTS), test_rows=(INPUTS, INPUTS)
    )
    partition = Partition((np.arange(15), np.arange(15, 60)))
    federated_data = federate_dataset(dataset, partition, test="official")
    assert federated_data.test is not None
    assert federated_data.test.counts.tolist() == [15, 45]


def test_the_seed_decides_who_tests_on_what():
    def test_inputs(seed):
        split = federate_dataset(GOOD, iid(60, 5), test="official", seed=seed).test
        assert split is not None
        return split.examples[0].tolist()

    assert test_inputs(1) == test_inputs(1)
    assert test_inputs(1) != test_inputs(2)


def test_federation_errors():
    for options, message in [
        ({"test": "oficial"}, "test: 'oficial' is not"),
        ({"test": 1.0}, "test: 1.0 is not in"),
        ({"test": 0.5, "validation": 0.5}, r"validation \+ test: 1.0 is not below 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            federate_dataset(GOOD, contiguous(60, 3), **options)
    with pytest.raises(DataError, match="toy has no official test set"):
        federate_dataset(
            GOOD._replace(test_rows=None), contiguous(60, 3), test="official"
        )
    with pytest.raises(DataError, match="row 69 is not in the dataset, whose 60 rows"):
        federate_dataset(GOOD, contiguous(70, 3))


def test_generators_differ_by_seed_and_purpose():
    draws = {
        generator(seed, purpose).integers(2**40)
        for seed in (0, 1)
        for purpose in ("iid", "shards")
    }
    assert len(draws) == 4
    with pytest.raises(DataError, match=r"seed: 0\.5"):
        generator(0.5, "iid")  # type: ignore[arg-type]


def test_a_missing_extra_is_one_line():
    with pytest.raises(
        InputError, match=r"^csv: needs absent: pip install 'fedblend\["
    ):
        require("absent.part", "csv")
