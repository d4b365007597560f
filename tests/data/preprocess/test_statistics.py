# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Means of clients' means give scikit-learn's statistics on the pooled rows."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedblend.data import preprocess
from fedblend.data.preprocess.preprocessing import (
    Statistics,
    client_statistics,
    finish,
    sizes,
)
from fedblend.data.preprocess.schema import schema_of

ROWS = 600
SIZES = (1, 2, 7, 590)
"""Uneven clients."""


def fit(schema, clients):
    return preprocess.fit(schema, [schema.encode(columns) for columns in clients])


def objects(values) -> np.ndarray:
    return np.array(list(values), object)


@pytest.fixture(scope="module")
def columns():
    draw = np.random.default_rng(0)
    made = {
        "near": draw.normal(3.0, 2.0, ROWS),
        "far": 1e9 + draw.normal(0.0, 1.0, ROWS),
        "huge": draw.normal(-4e15, 3e14, ROWS),
        "tiny": draw.normal(2e-9, 1e-12, ROWS),
        "count": draw.poisson(3.0, ROWS),
        "word": objects(draw.choice(["b", "a", "c"], ROWS, p=[0.5, 0.3, 0.2])),
    }
    made["near"][draw.random(ROWS) < 0.2] = np.nan
    made["far"][draw.random(ROWS) < 0.1] = np.nan
    made["word"][draw.random(ROWS) < 0.004] = None
    return made


@pytest.fixture(scope="module")
def fitted(columns):
    edges = np.cumsum(SIZES)[:-1]
    parts = np.split(np.arange(ROWS), edges)
    clients = [
        {name: values[rows] for name, values in columns.items()} for rows in parts
    ]
    return fit(schema_of(columns), clients)


NUMBERS = ("near", "far", "huge", "tiny", "count")


def test_standardized_as_by_scikit_learn(columns, fitted):
    pooled = np.stack([columns[name] for name in NUMBERS], axis=1).astype(np.float64)
    theirs: Any = StandardScaler().fit(pooled)
    mine = dict(zip(fitted.columns, fitted.fitted, strict=True))
    means = [mine[name].mean for name in NUMBERS]
    np.testing.assert_allclose(means, theirs.mean_, rtol=1e-12)
    deviations = [mine[name].deviation for name in NUMBERS]
    np.testing.assert_allclose(deviations, theirs.scale_, rtol=1e-6)
    inputs = fitted.transform(columns)
    places = [fitted.features.index(name) for name in NUMBERS]
    expected = np.nan_to_num(theirs.transform(pooled), nan=0.0)
    np.testing.assert_allclose(inputs[:, places], expected, atol=2e-6)


def test_an_offset_of_eleven_digits_leaves_the_deviation_exact():
    """scikit-learn's own mean is worse here, so fractions are the reference."""
    values = 1e9 + np.random.default_rng(1).normal(0.0, 1e-2, ROWS)
    fitted = fit(schema_of({"x": values}), [{"x": values[:9]}, {"x": values[9:]}])
    exact = [Fraction(value) for value in values.tolist()]
    mean = sum(exact) / ROWS
    variance = float(sum((value - mean) ** 2 for value in exact) / ROWS)
    assert fitted.fitted[0].mean == float(mean)
    assert fitted.fitted[0].deviation == pytest.approx(variance**0.5, rel=1e-9)


def test_imputed_as_by_scikit_learn(columns, fitted):
    theirs: Any = SimpleImputer(strategy="mean").fit(columns["near"][:, None])
    assert fitted.fitted[0].mean == pytest.approx(theirs.statistics_[0], abs=1e-12)
    absent: Any = None
    words: Any = SimpleImputer(strategy="most_frequent", missing_values=absent)
    words.fit(columns["word"][:, None])
    row = {name: values[:1] for name, values in columns.items()}
    inputs = fitted.transform(row | {"word": objects([None])})[0]
    place = fitted.features.index(f"word={words.statistics_[0]}")
    assert inputs[place] == 1.0


def test_one_hot_as_by_scikit_learn(columns, fitted):
    present = np.array([word is not None for word in columns["word"]])
    theirs = OneHotEncoder(handle_unknown="ignore").fit(columns["word"][present, None])
    places = [n for n, name in enumerate(fitted.features) if name.startswith("word=")]
    names = [fitted.features[place].removeprefix("word=") for place in places]
    assert names == theirs.categories_[0].tolist()
    some = {name: values[present] for name, values in columns.items()}
    some["word"][0] = "never seen"
    expected = theirs.transform(some["word"][:, None]).toarray()
    np.testing.assert_array_equal(fitted.transform(some)[:, places], expected)


def test_the_order_of_clients_and_an_empty_client_do_not_matter(columns):
    schema = schema_of(columns)
    half = {name: values[:300] for name, values in columns.items()}
    rest = {name: values[300:] for name, values in columns.items()}
    none = {name: values[:0] for name, values in columns.items()}
    one, other = fit(schema, [half, rest]), fit(schema, [rest, none, half])
    for mine, theirs in zip(one.fitted, other.fitted, strict=True):
        assert mine.mean == pytest.approx(theirs.mean, rel=1e-12)
        assert mine.deviation == pytest.approx(theirs.deviation, rel=1e-6)


def test_what_leaves_a_client_are_means(columns):
    schema = schema_of(columns)
    own = client_statistics(schema, schema.encode(columns))
    assert isinstance(own, Statistics) and own.rows == ROWS
    parts = own._asdict()
    assert parts.pop("rows") == ROWS
    assert {name: of.shape for name, of in parts.items()} == {
        name: (size,) for name, size in sizes(schema).items()
    }
    assert finish(schema, [own]) == fit(schema, [columns])


def test_a_constant_in_training_rows_is_zero():
    columns = {"x": np.append(np.full(50, 1e9 + 0.1), 3.0), "y": np.arange(51) % 7}
    train = {name: values[:50] for name, values in columns.items()}
    fitted = fit(schema_of(columns), [train])
    assert fitted.fitted[0].deviation == 0.0
    # The weight of such an input is never trained, so that a new value says nothing.
    np.testing.assert_array_equal(fitted.transform(columns)[:, 0], 0.0)


def test_a_value_far_from_nearly_constant_training_rows_is_clipped():
    """One such patient of 42 once had a squared error of 1.8e9."""
    train = {"dose": np.append(np.zeros(199), 1e-3), "age": np.arange(200.0)}
    fitted = fit(schema_of(train), [train])
    patient = {"dose": np.array([500.0, -500.0]), "age": np.array([40.0, 50.0])}
    inputs = fitted.transform(patient)
    np.testing.assert_array_equal(inputs[:, 0], [10.0, -10.0])
    assert fitted.count_clipped(inputs) == {"dose": 2}
    assert fitted.count_clipped(fitted.transform(train)) == {"dose": 1}


@pytest.mark.parametrize("clients", [1, 4, 25])
def test_a_few_values_far_out_do_not_ruin_mean_and_deviation(clients):
    draw = np.random.default_rng(3)
    clean = draw.normal(120.0, 15.0, 500)
    dirty = clean.copy()
    dirty[::100] = [1e9, -1e9, 99999.0, 1e12, 1e6]
    parts = np.array_split(np.arange(500), clients)
    schema = schema_of({"pressure": dirty})
    ((_, mean, deviation, *_),) = fit(
        schema, [{"pressure": dirty[rows]} for rows in parts]
    ).fitted
    # Five of 500 values at up to 20 deviations are what is left of them.
    assert abs(mean - 120) < 4 and 14 < deviation < 15 * 3
    ((_, mean, deviation, *_),) = fit(
        schema, [{"pressure": clean[rows]} for rows in parts]
    ).fitted
    assert mean == pytest.approx(clean.mean(), rel=1e-12)
    assert deviation == pytest.approx(clean.std(), rel=1e-9)


def test_a_category_that_no_training_row_has_is_unknown():
    columns = {"word": objects(["a", "b"] * 10 + ["c"])}
    train = {"word": columns["word"][:20]}
    fitted = fit(schema_of(columns), [train])
    assert fitted.features == ("word=a", "word=b", "word=c")
    new = fitted.transform({"word": objects(["a", "c", "z"])})
    np.testing.assert_array_equal(new, [[1, 0, 0], [0, 0, 0], [0, 0, 0]])
