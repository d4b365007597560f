# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A newcomer's messy table simply works, from every source, and says what was done."""

import datetime
import gzip
import zipfile
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.parquet
import pytest

import fedblend as fb
from fedblend.data.dataset import AbsentColumnError, DataError, task_of
from fedblend.data.preprocess import Preprocessing, fit
from fedblend.data.readers.read import read, read_inputs, read_new_rows
from fedblend.data.readers.tables import read_table

ROWS = 120
DRAW = np.random.default_rng(0)


def messy() -> pandas.DataFrame:
    """All at once: ids, texts, dates, decimal commas, currency, missing values."""
    days = DRAW.integers(0, 700, ROWS)
    frame = pandas.DataFrame(
        {
            "patient_id": np.arange(1000, 1000 + ROWS),
            "site": DRAW.choice(["north", "south", "east"], ROWS),
            "age": DRAW.normal(60, 10, ROWS).round(),
            "weight": [f"{x:.1f}".replace(".", ",") for x in DRAW.normal(80, 9, ROWS)],
            "income": [f"${x:,.2f}" for x in DRAW.uniform(900, 90000, ROWS)],
            "humidity": [f"{x:.0f} %" for x in DRAW.uniform(20, 90, ROWS)],
            "sex": DRAW.choice(["f", "m"], ROWS),
            "smoker": DRAW.choice(["Yes", "no", "NO "], ROWS),
            "seen": [f"{datetime.date(2021, 1, 1) + datetime.timedelta(int(d))}"
                     for d in days],
            "day": [(datetime.date(2021, 1, 1) + datetime.timedelta(int(d))).strftime(
                "%d.%m.%Y") for d in days],
            "lab": DRAW.integers(0, 99, ROWS).astype(str),
            "notes": [f"patient number {n} said so" for n in range(ROWS)],
            "version": "1.0",
            "empty": None,
            "outcome": DRAW.choice(["well", "ill"], ROWS, p=[0.9, 0.1]),
        }
    )  # fmt: skip
    frame.loc[::9, "age"] = np.nan
    frame.loc[::8, "sex"] = "NA"
    frame.loc[3, "sex"] = "?"
    frame.loc[1::30, "lab"] = "<5"
    frame.loc[[5, 6], "outcome"] = None
    frame.loc[7, "site"] = None
    return frame


FRAME = messy()
MADE = {
    "patient_id": "drop",
    "age": "standardize",
    "weight": "standardize",
    "income": "standardize",
    "humidity": "standardize",
    "sex": "one_hot",
    "smoker": "flag",
    "seen": "date",
    "day": "date",
    "lab": "standardize",
    "notes": "drop",
    "version": "drop",
    "empty": "drop",
}


@pytest.fixture(scope="module", params=["csv", "semicolon", "parquet", "pandas"])
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("messy")
    if request.param == "csv":
        FRAME.to_csv(folder / "a.csv", index=False)
        return folder / "a.csv"
    if request.param == "semicolon":
        FRAME.to_csv(folder / "a.csv", index=False, sep=";", encoding="utf-8-sig")
        return folder / "a.csv"
    if request.param == "parquet":
        FRAME.to_parquet(folder / "a.parquet")
        return folder / "a.parquet"
    return FRAME


def test_a_messy_table_simply_works(source):
    dataset = read(source, target="outcome", client="site")
    schema = dataset.schema
    assert schema is not None and dataset.keys is not None
    assert {one.name: one.encoding for one in schema.columns} == MADE
    assert dataset.label_names == ("ill", "well")
    assert len(dataset.rows[0]) == ROWS - 3 == len(dataset.keys)
    said = " ".join(dataset.notes)
    assert "left out 2 of 120 rows, which have no 'outcome'" in said
    assert "left out 1 of 120 rows, which have no 'site'" in said
    assert sorted(set(dataset.keys)) == ["east", "north", "south"]

    data = fb.data.federate_dataset(
        dataset, fb.partition.by_key(dataset.keys), test=0.2
    )
    inputs, _ = data.train.examples
    assert inputs.dtype == np.float32 and inputs.shape[1] == schema.width
    assert np.isfinite(inputs).all() and np.abs(inputs).max() < 10
    assert task_of(dataset).shape == (schema.width,)
    assert data.preprocessing is not None
    # What is standardized has mean 0 and deviation 1 over training rows, and only them.
    age = inputs[:, data.preprocessing.features.index("income")]
    np.testing.assert_allclose([age.mean(), age.std()], [0, 1], atol=1e-5)


def test_all_sources_give_the_same_inputs(source):
    dataset = read(source, target="outcome", client="site")
    other = read(FRAME, target="outcome", client="site")
    np.testing.assert_allclose(dataset.rows[0], other.rows[0])
    np.testing.assert_array_equal(dataset.rows[1], other.rows[1])


def test_new_rows_are_raw_tables_too(source):
    dataset = read(source, target="outcome", client="site")
    data = fb.data.federate_dataset(
        dataset, fb.partition.by_key(dataset.keys), test=0.2
    )
    assert data.preprocessing is not None
    kept = Preprocessing.parse(data.preprocessing.dump())
    task = task_of(dataset)
    new = read_new_rows(
        FRAME[50:].sample(frac=1.0, random_state=0)[FRAME.columns[::-1]],
        task,
        target="outcome",
        client="site",
        preprocessing=kept,
    )
    assert new.rows[0].shape == (70, dataset.schema.width)  # pyright: ignore
    rows = read_inputs(FRAME.drop(columns="outcome"), task, preprocessing=kept)
    assert rows.shape == (ROWS, kept.schema.width) and rows.dtype == np.float32
    with pytest.raises(AbsentColumnError, match="no column 'weight'"):
        read_inputs(FRAME.drop(columns="weight"), task, preprocessing=kept)
    odd = FRAME.assign(weight="heavy")
    with pytest.raises(DataError, match="column 'weight': 'heavy' is not a number"):
        read_inputs(odd, task, preprocessing=kept)


def test_a_table_of_complete_numbers_is_preprocessed_and_an_array_is_not():
    frame = pandas.DataFrame(
        {"x": [1.5, 2.5, 1e4], "k": [1, 2, 3], "on": [True, False, True]}
    )
    named = frame.assign(y=[0, 1, 0])
    for schema in (
        read(named, target="y").schema,
        read(named, target="y", preprocess="always").schema,
    ):
        assert schema is not None and schema.width == 3
    for as_it_is in (
        read(named, target="y", preprocess="none"),
        read(frame.to_numpy(np.float32), target=[0, 1, 0]),
    ):
        assert as_it_is.schema is None
        np.testing.assert_array_equal(as_it_is.rows[0], frame.to_numpy(np.float32))
    with pytest.raises(DataError, match="preprocess: 'all' is not one of auto"):
        read(named, target="y", preprocess="all")  # pyright: ignore


def test_polars_arrow_dicts_and_arrays_are_tables():
    frame = polars.DataFrame(
        {
            "x": [1.0, None, 3.0, 4.0],
            "kind": polars.Series(["a", "b", None, "a"], dtype=polars.Categorical),
            "at": [datetime.datetime(2020, 1, day, 12) for day in range(1, 5)],
            "y": ["no", "yes", "no", "yes"],
        }
    )
    mine = read(frame, target="y")
    assert mine.schema is not None
    kinds = [one.kind for one in mine.schema.columns]
    assert kinds == ["number", "text", "date"]
    for other in (frame.to_arrow(), frame.to_dict(as_series=False)):
        np.testing.assert_array_equal(read(other, target="y").rows[0], mine.rows[0])
    values = np.array([[1.0, np.nan], [2.0, 3.0], [3.0, 5.0]])
    arrays = read(values, target=["a", "b", "a"], client=[1, 1, 2])
    assert arrays.columns == ("x0", "x1") and arrays.label_names == ("a", "b")
    assert arrays.keys is not None and arrays.keys.tolist() == [1, 1, 2]


def test_columns_of_pandas_may_hold_anything():
    zoned = pandas.to_datetime(["2020-01-01 10:00", "2021-06-01 12:00"], utc=True)
    frame = pandas.DataFrame(
        {
            "int": pandas.array([1, None], "Int64"),
            "flag": pandas.array([True, None], "boolean"),
            "word": pandas.Categorical(["a", "b"]),
            "when": zoned,
            "span": pandas.to_timedelta([1, 36], unit="h"),
            "mixed": [1, "two"],
            "list": [[1], [2]],
            "y": [0, 1],
        }
    )
    dataset = read(frame, target="y")
    assert dataset.schema is not None
    kinds = {one.name: one.kind for one in dataset.schema.columns}
    assert kinds == {
        "int": "number",
        "flag": "boolean",
        "word": "text",
        "when": "date",
        "span": "number",
        "mixed": "text",
        "list": "text",
    }
    spans = dataset.rows[0][:, dataset.columns.index("span")]
    np.testing.assert_allclose(spans, [1 / 24, 1.5])
    whens = dataset.rows[0][:, dataset.columns.index("when")]
    assert whens[0] == 18262 + 10 / 24


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_csv_files_of_all_kinds(tmp_path):
    path = write(tmp_path / "a.csv", " x , y\n 1, a\n 2, b\n , a\n")
    dataset = read(path, target="y")
    assert dataset.columns == ("x",) and dataset.label_names == ("a", "b")
    for encoding in ("cp1252", "utf-16", "utf-8"):
        path = write(tmp_path / "b.csv", "straße,y\nKöln,1\nBonn,0\n", encoding)
        dataset = read(path, target="y")
        assert dataset.schema is not None
        assert dataset.schema.features == ("straße=Bonn", "straße=Köln")
        assert bool(dataset.notes) == (encoding != "utf-8")
    path = write(tmp_path / "c.csv", 'x,y\n"a\nb",1\n"c",0\n')
    assert read(path, target="y").schema is not None
    rows = "".join(f"{n % 90},{n % 2}.5\n" for n in range(200_000))
    path = write(tmp_path / "d.csv", f"x,y\n{rows}unknown,0.25\n")
    dataset = read(path, target="y")
    assert dataset.schema is not None and dataset.kind == "regression"
    assert dataset.schema.columns[0].kind == "number"
    path = write(tmp_path / "e.tsv", "x\ty\n1\ta\n\tb\n")
    dataset = read(path, target="y")
    assert "separated by '\\t'" in dataset.notes[0]


@pytest.mark.parametrize(
    ("values", "kind", "numbers"),
    [
        (["1", "0", None], "binary", [1, 0]),
        ([1.0, 0.0, np.nan], "binary", [1, 0]),
        ([3.0, 1.0, 2.0, np.nan], "classes", [2, 0, 1]),
        (["+", "-", ""], "binary", [0, 1]),
        (["1,5", "2,5", "NA"], "regression", [1.5, 2.5]),
        ([1.5, 2.5, None], "regression", [1.5, 2.5]),
        ([True, False, None], "binary", [1, 0]),
    ],
)
def test_targets_that_are_missing_leave_their_rows_out(values, kind, numbers):
    column = np.array(values, object)
    dataset = read({"x": np.arange(len(values)) * 1.5, "y": column}, target="y")
    assert dataset.kind == kind
    np.testing.assert_allclose(dataset.rows[1], numbers)
    assert "rows, which have no 'y'" in dataset.notes[0]
    with pytest.raises(DataError, match="column 'y' is empty in row"):
        read({"x": [1.5] * len(values), "y": column}, target="y", preprocess="none")


def test_too_large_and_infinite_numbers_are_missing():
    values = np.array([1.0, np.inf, 1e300, -np.inf, 2.0, 3.0] * 5)
    columns = {"x": values, "word": ["a", "b"] * 15}
    dataset = read(columns, target=["p", "q", "r"] * 10)
    assert dataset.schema is not None
    fitted = fit(dataset.schema, [dataset.schema.encode(read_table(columns).columns)])
    assert fitted.fitted[0].mean == 2.0
    assert np.isfinite(fitted.transform(read_table(columns).columns)).all()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({"x": [1, 2], "y": [0]}, {"target": "y"}, "'y' has shape .1,., the first"),
        ({"x": np.ones((1, 2)), "y": [0]}, {"target": "y"}, "'x' .*one value a row"),
        ({"x": ["a"], "y": [0]}, {"target": [0, 1]}, "1 rows, but 2 values of"),
        ({"x": ["a", "b"], "y": [None, ""]}, {"target": "y"}, "no row has 'y'"),
        ({"x": ["a", "a"], "y": [0, 1]}, {"target": "y"}, "'x' has one value only"),
        (5, {"target": "y"}, "a int is not a path, a data frame"),
        (pandas.DataFrame([[1, 2]], columns=["x", "x"]), {"target": "x"}, "than once"),
        (
            {"x": ["a", "b"], "y": [0, 1]},
            {"target": "y", "preprocess": {"z": "drop"}},
            "preprocess: there is no column 'z'",
        ),
        (
            {"x": ["a", "b"], "y": [0, 1]},
            {"target": "y", "preprocess": {"x": "standardise"}},
            "preprocess.x: 'standardise' is unknown; allowed are standardize",
        ),
        (
            {"x": ["a", "b"], "y": [0, 1]},
            {"target": "y", "preprocess": {"x": "standardize"}},
            "preprocess.x: standardize needs numbers, and there is text",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(source, options, message):
    with pytest.raises(DataError, match=message) as error:
        read(source, **options)
    assert "\n" not in str(error.value)


def test_a_table_of_someone_else_may_be_arrow(tmp_path):
    table = pyarrow.table({"x": ["a", "b", None], "y": [0, 1, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", target="y").schema is not None


def test_raw_rows_are_not_trained_on_by_mistake():
    dataset = read(FRAME, target="outcome", client="site")
    parts = fb.partition.by_key(dataset.keys)
    with pytest.raises(DataError, match=r"fb\.data\.federate_dataset"):
        fb.federate(dataset.rows, parts)
    data = fb.data.federate_dataset(dataset, parts)
    assert type(data.train.examples[0]) is np.ndarray


def test_many_whole_numbers_are_a_regression_and_noted():
    """Length of stay is no problem of 54 classes; ten grades may be classes."""
    days = {"stay": np.arange(108) // 2, "x": np.linspace(0, 1, 108)}
    found = read(days, target="stay")
    (note,) = found.notes
    assert found.kind == "regression" and found.outputs == 1
    assert "54 different whole numbers" in note and 'kind = "classes"' in note
    asked = read(days, target="stay", kind="classes")
    assert (asked.kind, asked.outputs, asked.notes) == ("classes", 54, ())
    assert read(days | {"stay": np.arange(108) % 11}, target="stay").outputs == 1
    grades = read(days | {"stay": np.arange(108) % 10}, target="stay")
    assert (grades.kind, grades.outputs, grades.notes) == ("classes", 10, ())
    words = read(days | {"stay": [f"w{n % 54}" for n in range(108)]}, target="stay")
    assert (words.kind, words.outputs) == ("classes", 54)
    array = read(np.ones((108, 2)), target=days["stay"], preprocess="none")
    assert array.kind == "regression"


def test_columns_are_dropped_by_name(tmp_path):
    visits = {
        "age": [1, 2, 4],
        "hospital": [*"aab"],
        "code": [7, 8, 8],
        "ill": [0, 1, 0],
    }
    named: Any = {"target": "ill", "client": "hospital"}
    assert read(visits, **named, drop=["code"]).columns == ("age",)
    with pytest.raises(DataError, match=r"drop: .* 'cod'; did you mean 'code'\?"):
        read(visits, **named, drop=["cod"])
    for wrong, said in (
        ({"drop": ["ill"]}, "drop: 'ill' is the target or client"),
        ({"drop": ["age"], "inputs": ["age", "code"]}, "drop: 'age' is one of the inp"),
        ({"inputs": ["age", "ill"]}, "inputs: 'ill' is the target"),
        ({"client": "ill"}, "client: 'ill' is the target"),
    ):
        with pytest.raises(DataError, match=said):
            read(visits, **{**named, **wrong})
    np.savez(tmp_path / "x.npz", inputs=np.ones((3, 2)), targets=[0, 1, 0])
    with pytest.raises(DataError, match="drop: needs a table"):
        read(tmp_path / "x.npz", drop=["code"])


def test_bounds_among_numbers_are_read_as_their_number():
    ages = [str(age) for age in range(20, 80)] + ["> 89"] * 4 + ["<1", "90+", "?"]
    schema = read({"age": ages}, target=np.arange(67) % 2).schema
    assert schema is not None
    (age,) = schema.columns
    assert age.kind == "number"
    assert "6 texts such as '> 89' as their number, 1 of 67 missing" in age.seen
    encoded = schema.encode({"age": np.array(["> 89", "<1", "90+", "30"], object)})
    assert encoded[:, 0].tolist() == [89, 1, 90, 30]
    groups = {"age": ["<65", ">=65"] * 20, "dose": ["1+", "2+", "3+", "0"] * 10}
    words = read(groups, target=np.arange(40) % 2, inputs=["age", "dose"]).schema
    assert words is not None and {one.kind for one in words.columns} == {"text"}


def test_compressed_tables_are_read(tmp_path):
    text = b"age;at;ill\n1,5;a;yes\n2,5;b;no\n4,5;b;no\n"
    (tmp_path / "my.csv").write_bytes(text)
    (tmp_path / "my.csv.gz").write_bytes(gzip.compress(text))
    with zipfile.ZipFile(tmp_path / "my.zip", "w") as made:
        made.writestr("readme.txt", "about")
        made.writestr("my.csv", text)
    named: Any = {"target": "ill", "client": "at"}
    plain, packed, zipped = (
        read(tmp_path / name, **named) for name in ("my.csv", "my.csv.gz", "my.zip")
    )
    for one in (packed, zipped):
        np.testing.assert_array_equal(one.rows[0], plain.rows[0])
        assert (one.schema, one.name) == (plain.schema, "my")
    for name in ("cut.csv.gz", "cut.zip"):
        whole = tmp_path / name.replace("cut.csv", "my.csv").replace("cut.z", "my.z")
        (tmp_path / name).write_bytes(whole.read_bytes()[:30])
        with pytest.raises(DataError, match=f"{name}: cannot be read"):
            read(tmp_path / name, **named)
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as made:
        made.writestr("a.csv", text)
        made.writestr("b.csv", text)
    with pytest.raises(DataError, match=r"two\.zip: has 2 \.csv or \.tsv files"):
        read(tmp_path / "two.zip", **named)


def test_columns_without_a_name_are_numbered(tmp_path):
    """Spreadsheets write such columns at the end, R one at the beginning."""
    path = tmp_path / "a.csv"
    path.write_text('"",a, ,\n1,2,,\n3,4,,\n')
    assert [*read_table(path).columns] == ["column 1", "a", "column 3", "column 4"]


def test_codes_keep_their_zeros(tmp_path):
    """As numbers, ward 01 and ward 1 would be one client; an age stays a number."""
    rows = [
        "ward,age,y",
        *(
            f"{ward},0{age},{age}.5"
            for ward in ("01", "1", "030001")
            for age in range(40, 44)
        ),
    ]
    (tmp_path / "wards.csv").write_text("\n".join(rows))
    found = fb.data.read(tmp_path / "wards.csv", target="y", client="ward")
    assert found.keys is not None
    assert sorted({str(one) for one in found.keys}) == ["01", "030001", "1"]
    assert found.rows[0].shape == (12, 1)  # an age is a number, written so or so
