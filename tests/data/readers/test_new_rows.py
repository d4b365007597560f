# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of new clients: read as the task has them, or refused."""

import numpy as np
import pytest

from fedblend.data.dataset import DataError, Task
from fedblend.data.readers.read import read_new_rows

SHAPE = (2, 2)


def saved(tmp_path, targets, inputs=None, **more):
    path = tmp_path / "new.npz"
    rows = np.ones((len(targets), *SHAPE)) if inputs is None else inputs
    np.savez(path, inputs=rows, targets=targets, **more)
    return path


@pytest.mark.parametrize(
    ("task", "targets", "expected"),
    [
        (Task("classes", 3, SHAPE), [2, 0], [2, 0]),
        (Task("classes", 3, SHAPE), [2.0, 0.0], [2, 0]),
        (Task("classes", 3, SHAPE, ("3", "5", "7")), [7, 7], [2, 2]),
        (Task("classes", 3, SHAPE, ("3.0", "5.0", "7.0")), [7, 3], [2, 0]),
        (Task("classes", 3, SHAPE, ("a", "b", "c")), ["c", "a"], [2, 0]),
        (Task("binary", 1, SHAPE, ("-1", "1")), [-1, 1], [0, 1]),
        (Task("binary", 1, SHAPE), [1, 1], [1, 1]),
        (Task("regression", 1, SHAPE), [0.5, 2], [0.5, 2]),
        (Task("tags", 2, SHAPE), [[0, 1], [1, 1]], [[0, 1], [1, 1]]),
    ],
)
def test_targets_are_what_the_model_was_trained_on(tmp_path, task, targets, expected):
    further = read_new_rows(saved(tmp_path, targets), task)
    np.testing.assert_array_equal(further.rows[1], expected)
    assert further.rows[0].shape == (len(targets), *SHAPE)
    assert further.keys is None


@pytest.mark.parametrize(
    ("task", "targets", "message"),
    [
        (Task("classes", 3, SHAPE), [2, 3], "target 3 is no class"),
        (Task("classes", 3, SHAPE), [0.5, 1], "target 0.5 is no class"),
        (Task("classes", 2, SHAPE, ("a", "b")), [0, 1], "these are a, b"),
        (Task("classes", 2, SHAPE), [[0, 1], [1, 0]], "one a row"),
        (Task("regression", 1, SHAPE), [[0.5, 1], [1, 2]], "2 targets a row"),
        (Task("regression", 1, SHAPE), ["a", "b"], "must be numbers"),
        (Task("tags", 3, SHAPE), [[0, 1], [1, 1]], r"shape \(2, 3\)"),
        (Task("classes", 3, (4,)), [0, 1], r"shape \(2, 2\), but .* on \(4,\)"),
        (Task("classes", 3, SHAPE), [], "no rows"),
    ],
)
def test_other_rows_are_refused_in_one_line(tmp_path, task, targets, message):
    with pytest.raises(DataError, match=message) as error:
        read_new_rows(saved(tmp_path, targets), task)
    assert "\n" not in str(error.value)


def test_a_table_takes_the_shape_of_the_task(tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("p,q,r,s,label\n1,2,3,4,0\n5,6,7,8,1\n")
    further = read_new_rows(path, Task("classes", 2, SHAPE), target="label")
    np.testing.assert_array_equal(further.rows[0][1], [[5, 6], [7, 8]])


def test_columns_are_found_by_name(tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("label,note,q,p\na,x,2,1\n")
    task = Task("classes", 2, (2,), ("a", "b"), ("p", "q"))
    further = read_new_rows(path, task, target="label")
    np.testing.assert_array_equal(further.rows[0], [[1, 2]])
