# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs that are odd are named, and those of the datasets that ship are not."""

import numpy as np
import pytest

from fedblend.data import datasets
from fedblend.data.dataset import Dataset
from fedblend.data.readers.checks import index_like, leaks, tells_target, wild_scales
from fedblend.data.readers.read import read

ROWS = 40
DRAW = np.random.default_rng(0)
USUAL = {
    "age": DRAW.integers(20, 60, ROWS),
    "height": DRAW.normal(size=ROWS),
    "body_mass_index": DRAW.integers(18, 30, ROWS),
    "covid": DRAW.integers(0, 2, ROWS),
}


def table(**columns) -> Dataset:
    """A dataset of columns; they are scaled, so that only what is asked for is odd."""
    inputs = np.stack(list(columns.values()), axis=1).astype(np.float32)
    targets = np.arange(ROWS, dtype=np.int32) % 2
    return Dataset((inputs, targets), "binary", 1, columns=tuple(columns))


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("__index_level_0__", DRAW.integers(0, 9, ROWS), "by its name"),
        ("Unnamed: 0", DRAW.integers(0, 9, ROWS), "by its name"),
        ("", np.arange(ROWS), "all values differ"),
        ("index", DRAW.integers(0, 9, ROWS), "by its name"),
        ("ID", DRAW.integers(0, 9, ROWS), "by its name"),
        ("patient_id", DRAW.integers(0, 9, ROWS), "by its name"),
        ("customerId", DRAW.integers(0, 9, ROWS), "by its name"),
        ("x", np.arange(ROWS) + 1, "all values differ"),
        ("x", DRAW.permutation(1000)[:ROWS], "all values differ"),
    ],
)
def test_an_index_is_named(name, values, why):
    (line,) = index_like(table(**USUAL, **{name: values}))
    assert f"an index or an id: {name!r} ({why});" in line
    assert "age" not in line


def test_what_is_measured_is_no_index():
    assert list(index_like(table(**USUAL))) == []
    assert list(index_like(table(id=DRAW.normal(size=ROWS)))) == []
    few = table(**USUAL)
    assert (
        list(index_like(few._replace(rows=tuple(part[:3] for part in few.rows)))) == []
    )


def test_columns_without_names_have_numbers():
    odd = table(x=np.arange(ROWS) * 100)._replace(columns=())
    assert "column 0 (all values differ)" in next(index_like(odd))
    assert "column 0 up to 3900" in next(wild_scales(odd))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (DRAW.normal(size=ROWS) + 2020, "'x' up to 202"),
        (
            np.where(np.arange(ROWS) == 3, -1e5, 0),
            "'x' up to 1e+05 (2.5e+03 on average)",
        ),
        (DRAW.uniform(60, 200, ROWS), "on average)"),
        (DRAW.normal(size=ROWS) * 1e-5, "'x' at most "),
    ],
)
def test_wild_scales_are_named(values, expected):
    (line,) = wild_scales(table(height=DRAW.normal(size=ROWS), x=values))
    assert expected in line
    assert "height" not in line


def test_usual_scales_are_not():
    tame = table(height=DRAW.normal(size=ROWS), zero=np.zeros(ROWS), x=np.full(ROWS, 9))
    assert list(wild_scales(tame)) == []


def test_pixels_have_one_scale():
    image = np.zeros((ROWS, 4, 4, 1), np.float32)
    image[0, 0, 0] = 1 / 255  # a corner that is nearly always black
    image[:, 1:] = 1
    tame = Dataset((image, np.arange(ROWS, dtype=np.int32) % 2), "binary", 1)
    assert list(wild_scales(tame)) == []
    (line,) = wild_scales(tame._replace(rows=(255 * image, tame.rows[1])))
    assert "values up to 255" in line


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("digits", {}),
        ("breast_cancer", {}),
        ("synthetic", {"gamma": 1.0, "beta": 1.0, "clients": 20}),
        ("two_sines", {}),
        pytest.param("mnist", {}, marks=pytest.mark.slow),
        ("a6a", {}),
    ],
)
def test_datasets_that_ship_are_not_odd(name, options, needs):
    needs(*(one.name for one in datasets.DATASETS[name].needs[:1]))
    shipped = datasets.load(name, **options)
    assert [*index_like(shipped), *wild_scales(shipped)] == []


def test_a_column_that_tells_the_target_is_named():
    outcome = np.array(["ill", "well"])[DRAW.integers(0, 2, 200)]
    columns = {
        "code": np.array([{"ill": "C1", "well": "C2"}[one] for one in outcome], object),
        "ward": np.array(["a", "b"], object)[DRAW.integers(0, 2, 200)],
        "age": DRAW.normal(size=200),
    }
    (line,) = tells_target(read(columns, target=outcome))
    assert "'code' (AUC 1)" in line and line.endswith('drop = ["code"]')
    columns["code"][0] = "C1" if outcome[0] == "well" else "C2"
    (line,) = tells_target(read(columns, target=outcome))  # nearly so
    assert "'code' (AUC 0.99" in line
    columns["code"][:60] = "C1"
    assert list(tells_target(read(columns, target=outcome))) == []


NUMBERS = np.random.default_rng(1).gamma(2.0, 3.0, 300)
THREE = np.digitize(NUMBERS, [3.0, 7.0])


@pytest.mark.parametrize("preprocess", ["auto", "none"])
@pytest.mark.parametrize(
    ("target", "column", "said"),
    [
        (NUMBERS, NUMBERS, "equals it"),
        (NUMBERS, 32 - 1.8 * NUMBERS, "R^2 1"),
        (NUMBERS, np.exp(NUMBERS), "rank correlation 1"),
        (NUMBERS > 5, NUMBERS, "AUC 1"),
        (NUMBERS > 5, -np.round(NUMBERS), "AUC 0.99"),
        (np.array(["a", "b", "c"])[THREE], NUMBERS, "accuracy 0.99"),
        (THREE, (THREE + 1) % 3, "accuracy 1"),
    ],
)
def test_a_copy_of_the_target_in_any_form_is_named(target, column, said, preprocess):
    noise = np.random.default_rng(2).normal(size=len(column))
    rows = {"copy": column, "fair": NUMBERS + 4 * noise, "noise": noise}
    dataset = read(rows, target=target, preprocess=preprocess)
    (found,) = leaks(dataset).items()
    assert found[0] == "copy" and found[1].startswith(said)
    assert f"'copy' ({said}" in next(tells_target(dataset))


@pytest.mark.parametrize("written", [7.5, NUMBERS])
@pytest.mark.parametrize("target", [NUMBERS > 5, THREE > 0])
def test_a_column_that_one_class_does_not_have_is_named(target, written):
    rows = {"stay": np.where(target, np.nan, written), "fair": NUMBERS % 1}
    found = leaks(read(rows, target=np.where(target, "dead", "alive")))
    assert found == {"stay": "AUC 1 by where it is missing"}


def test_few_rows_of_a_class_or_of_a_column_tell_nothing():
    rare = np.arange(300) < 3
    assert leaks(read({"x": np.arange(300.0) + NUMBERS}, target=rare)) == {}
    sparse = np.where(np.arange(300) < 100, NUMBERS, np.nan)
    assert leaks(read({"x": sparse, "y": NUMBERS % 1}, target=NUMBERS)) == {}


def test_whole_numbers_that_all_differ_are_named_in_a_raw_table():
    numbers = DRAW.permutation(1000)[:ROWS]
    columns = {"x": numbers, "age": USUAL["age"]}
    (line,) = index_like(read(columns, target=np.arange(ROWS) % 2))
    assert "'x' (all values differ)" in line and "age" not in line
