# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The user's own data: every format, every way it can be wrong."""

import json

import numpy as np
import pytest

from fedblend.data.dataset import DataError, MissingDataError, Task
from fedblend.data.readers.read import read, read_inputs

CSV = "age,site,ill,weight\n1,a,yes,0.5\n2,b,no,1.5\n3,a,no,2.5\n"


@pytest.fixture
def table(tmp_path):
    def write(text=CSV, name="my.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_csv(table):
    dataset = read(table(), target="ill", client="site")
    assert dataset.kind == "binary"
    assert dataset.outputs == 1
    assert dataset.name == "my"
    assert dataset.columns == ("age", "weight")
    assert dataset.label_names == ("no", "yes")
    np.testing.assert_array_equal(dataset.rows[0], [[1, 0.5], [2, 1.5], [3, 2.5]])
    plain = read(table(), target="ill", client="site", preprocess="none")
    np.testing.assert_array_equal(plain.rows[0], dataset.rows[0])
    assert plain.rows[0].dtype == np.float32
    assert dataset.rows[1].tolist() == [1, 0, 0]
    assert dataset.keys is not None
    assert dataset.keys.tolist() == ["a", "b", "a"]


def test_parquet_is_the_same(table, tmp_path):
    import pyarrow.csv
    import pyarrow.parquet

    path = tmp_path / "my.parquet"
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(table()), path)
    mine, theirs = (read(p, target="ill", client="site") for p in (path, table()))
    np.testing.assert_array_equal(mine.rows[0], theirs.rows[0])
    assert mine.columns == theirs.columns


def parquet(path, index, **columns):
    """A table as pandas writes it: its index is a column, the metadata says which."""
    import pyarrow
    import pyarrow.parquet

    about = json.dumps({"index_columns": index, "columns": []})
    made = pyarrow.table(columns).replace_schema_metadata({"pandas": about})
    pyarrow.parquet.write_table(made, path)
    return path


RANGE = {"kind": "range", "name": None, "start": 0, "stop": 3, "step": 1}


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("__index_level_0__", ["__index_level_0__"]),
        ("__index_level_0__", [RANGE]),
        ("patient", ["patient"]),
    ],
)
def test_the_index_of_pandas_is_no_input_unless_asked_for(tmp_path, name, index):
    columns = {"x": [0.5, 1.5, 2.5], "y": [0, 1, 0], name: [7, 8, 9]}
    path = parquet(tmp_path / "a.parquet", index, **columns)
    dataset = read(path, target="y")
    assert dataset.columns == ("x",)
    (note,) = dataset.notes
    assert f"a.parquet: left out {name!r}, the index of a pandas table" in note
    rows = read_inputs(path, Task("binary", 1, (1,)), others=["y"])
    assert rows.shape == (3, 1)
    asked = read(path, target="y", inputs=["x", name])
    assert (asked.columns, asked.notes) == (("x", name), ())
    assert read(path, target="y", client=name).notes == ()


def test_a_table_of_someone_else_has_no_index(tmp_path):
    import pyarrow
    import pyarrow.parquet

    odd = pyarrow.table({"x": [1.5, 2.5], "y": [0, 1]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(odd.replace_schema_metadata({"pandas": "{"}), path)
    assert read(path, target="y").columns == ("x",)


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_two_classes_written_as_real_numbers_are_classes(tmp_path, low):
    path = npz(tmp_path / "a.npz", inputs=X, targets=np.array([low, 1, 1, low, 1, 1.0]))
    dataset = read(path)
    assert (dataset.kind, dataset.outputs) == ("binary", 1)
    assert dataset.rows[1].tolist() == [0, 1, 1, 0, 1, 1]
    assert f"a.npz: targets are {low} and 1.0 only" in dataset.notes[0]
    numbers = read(path, kind="regression")
    assert (numbers.kind, numbers.notes) == ("regression", ())
    assert read(path, kind="binary").notes == ()


def test_other_real_numbers_are_not(tmp_path):
    for values in ([0.0, 0.5, 1, 0, 0, 0], [1.0, 2, 1, 2, 1, 1]):
        path = npz(tmp_path / "a.npz", inputs=X, targets=np.array(values))
        assert (read(path).kind, read(path).notes) == ("regression", ())


@pytest.mark.parametrize(
    ("target", "kind", "expected", "outputs", "values"),
    [
        ("age", None, "classes", 3, [0, 1, 2]),
        ("weight", None, "regression", 1, [0.5, 1.5, 2.5]),
        ("age", "regression", "regression", 1, [1, 2, 3]),
        ("site", None, "binary", 1, [0, 1, 0]),
        ("site", "classes", "classes", 2, [0, 1, 0]),
    ],
)
def test_kinds(table, target, kind, expected, outputs, values):
    inputs = ["weight"] if target == "age" else ["age"]
    dataset = read(table(), target=target, inputs=inputs, kind=kind)
    assert (dataset.kind, dataset.outputs) == (expected, outputs)
    assert dataset.rows[1].tolist() == values
    assert dataset.keys is None


def test_inputs_may_be_texts_of_numbers_booleans_and_large_integers(table):
    text = "x,b,n,y\n1e3,true,9007199254740993,0\n2,false,2,1\n"
    dataset = read(table(text), target="y")
    assert dataset.rows[0][0].tolist() == [1000.0, 1.0, 2.0**53]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CSV, {}, "target: name one of the columns age, site, ill, weight"),
        (CSV, {"target": "sick"}, "no column 'sick'; there are age, site, ill, weight"),
        (CSV, {"target": "ill", "client": "who"}, "no column 'who'"),
        (CSV, {"target": "ill", "inputs": ["age", "z"]}, "no column 'z'"),
        (CSV, {"target": "ill", "inputs": []}, "at least one column"),
        (CSV, {"target": "ill", "inputs": "ill"}, "is the target"),
        (CSV, {"target": "ill"}, "'site' is not numeric: row 0 .* is 'a'"),
        (CSV, {"target": "ill", "inputs": "age", "kind": "regression"}, "not yes"),
        (CSV, {"target": "age", "inputs": "weight", "kind": "binary"}, "not 3"),
        (CSV, {"target": "weight", "inputs": "age", "kind": "classes"}, "real numbers"),
        (CSV, {"target": "ill", "kind": "ranking"}, "kind: 'ranking'"),
        ("x,y\n1,0\n,1\n", {"target": "y"}, "row 1 .* column 'x' is nan"),
        ("x,y\n1,0\n1e99,1\n", {"target": "y"}, "row 1 .* column 'x' is inf"),
        ("x,y\n1,0\n1,\n", {"target": "y"}, "column 'y' is empty in row 1"),
        ("x,y,c\n1,0,\n1,1,2\n", {"target": "y", "client": "c"}, "'c' is empty in row"),
        ("x,y\n,0\n,1\n", {"target": "y"}, "'x' is not numeric: row 0 .* is None"),
        ("x,y\n1,0\n2,0\n", {"target": "y"}, "all 2 targets are 0; at least 2"),
        ("x,x,y\n1,1,0\n", {"target": "y"}, "'x' occurs more than once"),
        ("x,y\n", {"target": "y"}, "there are no rows"),
        ("", {"target": "y"}, "cannot be read: Empty CSV file"),
        ("x,y\n1,0,3\n", {"target": "y"}, "cannot be read: CSV parse error"),
    ],
)
def test_errors_of_a_table_of_numbers(table, text, options, message):
    with pytest.raises(DataError, match=message) as error:
        read(table(text), **options, preprocess="none")
    assert "\n" not in str(error.value)


X = np.arange(12.0).reshape(6, 2)
Y = np.arange(6) % 3


def test_npz(tmp_path):
    path = npz(tmp_path / "a.npz", inputs=X, targets=Y, clients=Y // 2)
    dataset = read(path)
    assert (dataset.kind, dataset.outputs) == ("classes", 3)
    assert dataset.keys is not None
    assert dataset.keys.tolist() == [0, 0, 1, 0, 0, 1]
    path = npz(tmp_path / "b.npz", x=X, y=X)
    dataset = read(path, inputs="x", target="y")
    assert (dataset.kind, dataset.outputs, dataset.keys) == ("regression", 2, None)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"inputs": X}, {}, "no array 'targets'; there are inputs"),
        ({"inputs": X, "targets": Y}, {"client": "who"}, "no array 'who'"),
        ({"inputs": X, "targets": Y}, {"inputs": ["a"]}, "name one array"),
        ({"inputs": X[:, 0], "targets": Y}, {}, r"\[rows, ...\], not float64 of"),
        ({"inputs": X.astype(str), "targets": Y}, {}, "must be numbers"),
        ({"inputs": X, "targets": Y[:, None, None]}, {}, r"not \(6, 1, 1\)"),
        ({"inputs": X, "targets": Y[:, None]}, {}, "one a row, not of shape"),
        ({"inputs": X, "targets": Y, "clients": X}, {}, "'clients' must be one key"),
        ({"inputs": X, "targets": Y[:4]}, {}, "6 rows of inputs, but 4 targets"),
        ({"inputs": X[:0], "targets": Y[:0]}, {}, "there are no rows"),
        ({"inputs": X, "targets": 0 * Y}, {}, "all 6 targets are 0"),
        ({"inputs": X * np.nan, "targets": Y}, {}, "row 0 .* column 0 is nan"),
        ({"inputs": X * 1e99, "targets": Y}, {}, "is inf"),
        (
            {"inputs": X, "targets": np.array([None] * 6)},
            {},
            "'targets' holds Python objects, which are never loaded",
        ),
    ],
)
def test_npz_errors(tmp_path, arrays, options, message):
    with pytest.raises(DataError, match=message) as error:
        read(npz(tmp_path / "a.npz", **arrays), **options)
    assert "\n" not in str(error.value)


def test_wrong_files(tmp_path):
    with pytest.raises(MissingDataError, match="no such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.csv")
    with pytest.raises(DataError, match="cannot read a file without suffix"):
        read(tmp_path)
    (tmp_path / "a.xlsx").write_text("")
    with pytest.raises(DataError, match=r"cannot read \.xlsx; allowed are"):
        read(tmp_path / "a.xlsx")
    (tmp_path / "a.parquet").write_text("nonsense")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "a.parquet", target="y")
    for content in (b"", b"nonsense", b"PK\x03\x04 nonsense"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(DataError, match="damaged, or not an"):
            read(tmp_path / "a.npz")
