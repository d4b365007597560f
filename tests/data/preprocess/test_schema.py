# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every column gets a clear decision, which is shown, kept, and can be overruled."""

import datetime
import json
import random

import numpy as np
import pytest

from fedblend.data import preprocess
from fedblend.data.dataset import DataError
from fedblend.data.preprocess import Preprocessing, schema_of

DRAW = np.random.default_rng(0)
ROWS = 400


def fit(schema, clients):
    return preprocess.fit(schema, [schema.encode(columns) for columns in clients])


def objects(values) -> np.ndarray:
    made = np.empty(len(values := list(values)), object)
    made[:] = values
    return made


def many(count: int, *, frequent: float) -> np.ndarray:
    """Texts, of which five are frequent."""
    usual = DRAW.random(ROWS) < frequent
    rare = [f"w{n}" for n in DRAW.integers(5, count, ROWS)]
    return objects(np.where(usual, [f"w{n % 5}" for n in range(ROWS)], rare))


def one(values, choice=None, name="x", **options):
    columns = {name: values, "z": np.arange(len(values)) % 7}
    choices = None if choice is None else {name: choice}
    return schema_of(columns, choices, **options).columns[0]


@pytest.mark.parametrize(
    ("name", "values", "encoding", "why"),
    [
        ("age", DRAW.integers(0, 90, ROWS), "standardize", ""),
        ("row", np.arange(ROWS), "drop", "numbers the rows"),
        ("row", DRAW.permutation(ROWS) + 5.0, "drop", "numbers the rows"),
        ("income", 3 * np.arange(ROWS), "standardize", "all values differ"),
        ("patient_id", 3 * np.arange(ROWS), "drop", "is an id by its name"),
        ("ward_id", np.arange(ROWS) % 4, "one_hot", "numbers that are names"),
        ("Unnamed: 0", np.arange(ROWS), "drop", "numbers the rows"),
        ("flag", np.arange(ROWS) % 2, "flag", ""),
        ("same", np.ones(ROWS), "drop", "has one value only"),
        ("none", np.full(ROWS, np.nan), "drop", "has no value"),
        ("word", objects(["a", "b"] * 200), "one_hot", ""),
        ("word", many(60, frequent=0.95), "one_hot", "rare categories share one input"),
        ("word", many(9999, frequent=0.1), "drop", "different texts, too many"),
        ("uuid", objects([f"{n:x}" for n in range(ROWS)]), "drop", "different texts"),
        ("free", objects([f"text {n}" for n in range(ROWS)]), "drop", "too many"),
        ("yes", objects(["Yes", "no"] * 200), "flag", ""),
        ("yes", objects([True, None] * 200), "flag", ""),
        ("day", np.datetime64("2020-01-01") + np.arange(ROWS), "date", ""),
    ],
)
def test_decisions(name, values, encoding, why):
    column = one(values, name=name)
    assert column.encoding == encoding
    assert why in column.why if why else column.why == ""
    assert bool(column.features) == (encoding != "drop")


def test_named_inputs_are_confirmed():
    assert one(np.arange(ROWS), confirmed=True).encoding == "standardize"
    ids = one(3 * np.arange(ROWS), name="patient_id", confirmed=True)
    assert ids.encoding == "standardize"


@pytest.mark.parametrize(
    ("texts", "numbers", "remark"),
    [
        (["1.5", "-2", "3e2"], [1.5, -2, 300], ""),
        (["1,5", "2,25", "1.234,5"], [1.5, 2.25, 1234.5], "with decimal commas"),
        (["1,234", "12", "1,234,567.5"], [1234, 12, 1234567.5], "between thousands"),
        (["1,234", "2,345", "3,456"], [1234, 2345, 3456], "would fit with decimal"),
        (["0,123", "0,456", "1,5"], [0.123, 0.456, 1.5], "with decimal commas"),
        (["12 %", "5%", "7 %"], [12, 5, 7], ""),
        (["$1,200", "€3", "£4.5"], [1200, 3, 4.5], "between thousands"),
        ([" 1", "2 ", "\N{NO-BREAK SPACE}3"], [1, 2, 3], ""),
    ],
)
def test_texts_of_numbers(texts, numbers, remark):
    values = objects(texts * 10)
    column = one(values)
    assert column.kind == "number"
    assert remark in column.seen
    encoded = schema_of({"x": values}).encode({"x": values})
    np.testing.assert_allclose(encoded[:3, 0], numbers)


@pytest.mark.parametrize(
    ("format", "remark"),
    [
        ("%Y-%m-%d", ""),
        ("%Y-%m-%dT%H:%M:%S", ""),
        ("%Y/%m/%d", "as %Y/%m/%d"),
        ("%d.%m.%Y", "as %d.%m.%Y"),
        ("%d.%m.%Y %H:%M", "as %d.%m.%Y %H:%M"),
        ("%m/%d/%Y", "as %m/%d/%Y"),
        ("%d/%m/%Y", "as %d/%m/%Y"),
        ("%d %b %Y", "as %d %b %Y"),
    ],
)
def test_texts_of_dates(format, remark):
    first = datetime.datetime(2021, 3, 5, 6)
    days = [first + datetime.timedelta(int(7 * n)) for n in range(100)]
    column = one(objects([day.strftime(format) for day in days]))
    assert (column.kind, column.encoding) == ("date", "date")
    assert remark in column.seen
    assert column.parts == ("year",)  # always on the same day of the week


def test_an_ambiguous_date_says_so_and_a_format_decides():
    values = objects(["03/04/2021", "05/06/2021", "07/08/2021"] * 8)
    assert "as %m/%d/%Y (they would fit as %d/%m/%Y, too)" in one(values).seen
    chosen = one(values, "%d/%m/%Y")
    assert (chosen.style, chosen.why) == ("%d/%m/%Y", "chosen")


def test_parts_of_dates_are_those_that_the_dates_cover():
    start = np.datetime64("2020-01-01T00:00")
    hours = start + np.arange(ROWS) * np.timedelta64(5, "h")
    assert one(hours).parts == ("week", "day")
    column = one(start + np.arange(ROWS) * np.timedelta64(3, "D"))
    assert column.parts == ("year", "week")
    assert column.features == (
        "x",
        *("x year sin", "x year cos", "x week sin", "x week cos"),
    )


def test_a_date_a_period_later_has_the_same_sine_and_cosine():
    hours = np.datetime64("2020-01-06T00:00") + np.arange(600) * np.timedelta64(5, "h")
    fitted = fit(schema_of({"x": hours}), [{"x": hours}])
    moments = np.array(["2020-02-03T07:00", "2020-02-10T07:00"], "datetime64[m]")
    first, later = fitted.transform({"x": moments})
    np.testing.assert_allclose(first[1:], later[1:], atol=1e-5)
    assert later[0] > first[0]
    angle = 2 * np.pi * 7 / 24
    np.testing.assert_allclose(first[-2:], [np.sin(angle), np.cos(angle)], atol=1e-5)


def test_choices_overrule():
    grades = objects(["low", "high", "mid", None] * 50)
    column = one(grades, ["low", "mid", "high"])
    assert column.encoding == "ordinal" and column.features == ("x", "x missing")
    schema = schema_of({"x": grades}, {"x": ["low", "mid", "high"]})
    np.testing.assert_array_equal(
        schema.encode({"x": grades})[:4, 0], [0, 2, 1, np.nan]
    )
    fitted = fit(schema, [{"x": grades}])
    new = fitted.transform({"x": objects(["mid", "other", "low"])})
    np.testing.assert_allclose(new[:, 0], [0.0, 0.0, -np.sqrt(1.5)], rtol=1e-6)
    assert one(np.arange(ROWS) % 3, "one_hot").categories == ("0", "1", "2")
    assert one(objects(["10", "9"] * 20), "ordinal").categories == ("9", "10")
    assert one(grades, "drop").features == ()
    as_is = schema_of({"x": np.arange(9.0)}, {"x": "as_is"})
    np.testing.assert_array_equal(
        fit(as_is, [{"x": np.arange(9.0)}]).transform({"x": np.arange(3.0)})[:, 0],
        [0, 1, 2],
    )
    for choice in ("date", "%d.%m.%Y", "standardize"):
        with pytest.raises(DataError, match=r"preprocess\.x: "):
            one(grades, choice)
    with pytest.raises(DataError, match=r"preprocess\.x: has 400 different texts"):
        one(objects([f"t{n}" for n in range(ROWS)]), "one_hot")


def test_a_client_may_have_only_numbers_that_mean_missing():
    """Cholesterol of all Swiss patients is 0; other values must be numbers still."""
    column = {"x": np.where(np.arange(ROWS) % 3, np.arange(ROWS), 0.0)}
    schema = schema_of(column, {"x": "missing 0"})
    assert np.isnan(schema.encode({"x": np.zeros(5)})).all()
    assert np.isnan(schema.encode({"x": objects(["0", "", "0.0"])})).all()
    with pytest.raises(DataError, match="column 'x': 'low' is not a number"):
        schema.encode({"x": objects(["low", "high"])})


def test_few_missing_values_have_no_input_of_their_own():
    values = DRAW.normal(size=ROWS)
    values[:3] = np.nan
    assert not one(values).missing
    values[:9] = np.nan
    assert one(values).missing


@pytest.fixture(scope="module")
def fitted():
    columns = {
        "x": DRAW.normal(size=ROWS),
        "w": many(60, frequent=0.9),
        "free": objects([f"text {n}" for n in range(ROWS)]),
        "day": np.datetime64("2020-01-01") + np.arange(ROWS) * 3,
    }
    columns["x"][::5] = np.nan
    return columns, fit(schema_of(columns), [columns])


def test_json_keeps_every_bit(fitted):
    columns, made = fitted
    text = made.dump()
    again = Preprocessing.parse(text)
    assert again == made
    np.testing.assert_array_equal(again.transform(columns), made.transform(columns))
    assert again.dump() == text


def test_a_description_has_a_line_for_each_column(fitted):
    columns, made = fitted
    said = {line["column"]: line for line in made.describe()}
    assert list(said) == list(columns)
    assert "80 of 400 missing" in said["x"]["seen"]
    assert "standardized (mean " in said["x"]["done"]
    assert "rare categories share one input" in said["w"]["done"]
    assert said["free"]["done"].startswith("dropped: has 400 different texts")
    assert sum(line["inputs"] for line in said.values()) == len(made.features)
    assert made.summarize().startswith("preprocessing: 3 columns make ")
    assert "dropped: 'free' has 400 different texts" in made.summarize()


def test_damaged_json_is_one_line(fitted):
    text, rng = fitted[1].dump(), random.Random(0)
    broken = ["", "[]", "{}", "null", json.dumps({"format": 1}), text[:-5]]
    stored = json.loads(text)
    for change in (
        {"kind": "frob"},
        {"encoding": 3},
        {"categories": [1]},
        {"categories": []},
        {"parts": ["century"]},
        {"other": 7},
        {"fitted": {}},
        {"fitted": {"present": 1, "mean": 1e999, "deviation": 1, "shares": []}},
        {"name": None},
    ):
        other = json.loads(text)
        other["columns"][1] |= change
        broken.append(json.dumps(other))
    broken.append(json.dumps(stored | {"columns": []}))
    for _ in range(200):
        place = rng.randrange(len(text))
        broken.append(text[:place] + rng.choice('x{}[]",:0') + text[place + 1 :])
    refused = 0
    for one_text in broken:
        try:
            Preprocessing.parse(one_text)
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused >= 16
