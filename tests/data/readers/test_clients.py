# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients of Python objects: the same rows and labels from each, or one clear line."""

import re
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.errors import InputError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2])
PARTS: Any = [[0, 3, 4], [1, 2, 5]]
OWNERS = ["b", "c", "c", "b", "b", "c"]
NAMES = ["cat", "dog", "owl"]


class Image:
    """The feature of a column of images: Hugging Face's name."""


class Texts:
    """The feature of other columns."""


class ClassLabel:
    """The feature of a column of classes."""

    names = NAMES


class StandIn:
    """The methods of a ``datasets.Dataset`` that are used."""

    def __init__(self, columns: dict[str, Any], kind: Any = None, **features: Any):
        self.columns, self.format = columns, {"type": kind}
        self.features = {name: Texts() for name in columns} | features

    column_names = property(lambda self: list(self.columns))

    def with_format(self, kind: str | None) -> "StandIn":
        return StandIn(self.columns, kind, **self.features)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return {name: column[key] for name, column in self.columns.items()}
        column = self.columns[key]
        return np.array(column) if self.format["type"] == "numpy" else list(column)


class Partitioner:
    """The methods of a partitioner of Flower Datasets that are used."""

    num_partitions = 2
    partition_id_to_natural_id = MappingProxyType({0: "b", 1: "c"})

    def load_partition(self, number: int) -> StandIn:
        rows = PARTS[number]
        return StandIn({"x": X[rows], "label": Y[rows]}, label=ClassLabel())


def table(**more: Any) -> StandIn:
    """All rows, with a column of clients."""
    return StandIn({"x": X, "label": Y, "who": OWNERS}, label=ClassLabel(), **more)


def pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[rows], Y[rows]) for rows in PARTS]


def torch_data() -> tuple[Any, Any]:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data, [torch.utils.data.Subset(data, rows) for rows in PARTS]


def loaders() -> dict[str, Any]:
    module, parts = torch_data()
    return {
        name: module.DataLoader(part, batch_size=2)
        for name, part in zip("bc", parts, strict=True)
    }


DATA: dict[str, Any] = {
    "list": lambda: fb.federate(pairs(), test=0.3),
    "mapping": lambda: fb.federate(dict(zip("bc", pairs(), strict=True)), test=0.3),
    "labels [n, 1]": lambda: fb.federate(
        [(x, y[:, None]) for x, y in pairs()], test=0.3
    ),
    "lists of Python": lambda: fb.federate(
        [(x.tolist(), y.tolist()) for x, y in pairs()], test=0.3
    ),
    "torch Dataset": lambda: fb.federate(torch_data()[1], test=0.3),
    "torch DataLoader": lambda: fb.federate(loaders(), test=0.3),
    "batches of mappings": lambda: fb.federate(
        [StandIn({"x": x, "label": y}, "custom") for x, y in pairs()], test=0.3
    ),
    "client column": lambda: fb.federate(table(), client="who", test=0.3),
    "partition of a Dataset": lambda: fb.federate(
        table(), PARTS, client="who", test=0.3
    ),
    "partitioner": lambda: fb.federate(Partitioner(), test=0.3),
}


@pytest.mark.parametrize("what", DATA)
def test_clients_have_the_rows_and_splits_of_flat_arrays(what):
    found, wanted = DATA[what](), fb.federate((X, Y), PARTS, test=0.3)
    for name, split in wanted.splits.items():
        for client in range(2):
            mine, theirs = found.splits[name].rows(client), split.rows(client)
            jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    names = () if "partition of" in what else ("0", "1")
    named = what in ("mapping", "torch DataLoader", "client column", "partitioner")
    assert found.names == (("b", "c") if named else names)
    from_classes = what in ("client column", "partition of a Dataset", "partitioner")
    assert found.label_names == (tuple(NAMES) if from_classes else ())


LABELS: dict[str, Any] = {
    "texts": (["no", "yes", "no"], [0, 1, 0], ("no", "yes")),
    "from 1": ([1, 3, 2], [0, 2, 1], ("1", "2", "3")),
    "gaps": ([0, 5, 2], [0, 5, 2], ()),
    "signs": ([-1, 1, 1], [0, 1, 1], ("-1", "1")),
    "truth": ([True, False, True], [1, 0, 1], ()),
    "0.0 and 1.0": ([0.0, 1.0, 0.0], [0, 1, 0], ("0.0", "1.0")),
    "numbers": ([0.5, 1.5, 2.0], [0.5, 1.5, 2.0], ()),
    "column of numbers": ([[0.5], [1.5], [1.0]], [[0.5], [1.5], [1.0]], ()),
    "tags": ([[0, 1], [1, 1], [1, 0]], [[0, 1], [1, 1], [1, 0]], ()),
}


@pytest.mark.parametrize("what", LABELS)
def test_labels_are_numbered_with_names_or_stay_numbers(what):
    given, wanted, names = LABELS[what]
    data = fb.federate({"a": (X[:3], given), "b": (X[:3], given)})
    inputs, labels = data.train.rows(1)
    order = np.lexsort(inputs.T)
    np.testing.assert_array_equal(labels[order], wanted)
    assert labels.dtype == (np.float32 if "numbers" in what else np.int32)
    assert data.label_names == names
    assert data.select([1]).label_names == names


def test_kind_decides_where_labels_do_not_tell():
    classes = fb.federate([(X[:3], [[3.0], [1.0], [2.0]])], kind="classes")
    numbers = fb.federate([(X[:3], [3, -1, 2])], kind="regression")
    assert classes.label_names == ("1.0", "2.0", "3.0")
    assert sorted(classes.train.examples[1]) == [0, 1, 2]
    assert sorted(numbers.train.examples[1]) == [-1.0, 2.0, 3.0]


def test_columns_of_numbers_are_inputs_side_by_side():
    columns = {"first": X[:, 0], "second": X[:, 1], "age": Y, "who": OWNERS}
    data = fb.federate(StandIn(columns), client="who", target="age")
    one = fb.federate(StandIn(columns), client="who", target="age", inputs="second")
    wanted = {tuple(row) for row in X.tolist()}
    assert {tuple(row) for row in data.train.examples[0].tolist()} == wanted
    assert sorted(one.train.examples[0][:, 0]) == X[:, 1].tolist()


def save_image(path: Any, value: int, shape: tuple[int, ...] = (4, 5)) -> Any:
    pillow = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pillow.fromarray(np.full(shape, value, np.uint8))
    image.save(path)
    return image


def test_a_folder_of_images_by_client_and_class(tmp_path):
    places = ["b/cat/1.png", "b/owl/2.png", "a/cat/3.PNG", "a/owl/4.png"]
    for number, place in enumerate(places):
        save_image(tmp_path / place, 51 * number)
    (tmp_path / "a/cat/notes.txt").write_text("no image")
    data = fb.federate(tmp_path)
    assert (data.names, data.label_names) == (("a", "b"), ("cat", "owl"))
    inputs, labels = data.train.rows(0)
    assert inputs.shape == (2, 4, 5, 1) and inputs.dtype == np.float32
    wanted = np.float32(51) * np.array([2, 3]) / 255
    np.testing.assert_allclose(np.sort(inputs[:, 0, 0, 0]), wanted, rtol=1e-6)
    assert labels[inputs[:, 0, 0, 0].argmax()] == 1


def test_images_of_a_column_and_of_a_list_are_pixels(tmp_path):
    images = [save_image(tmp_path / "x.png", 51 * n, (2, 2, 3)) for n in range(4)]
    columns = {"image": images, "label": [0, 1, 1, 0], "who": [7, 7, 9, 9]}
    column = fb.federate(StandIn(columns, image=Image()), client="who")
    listed = fb.federate({7: (images[:2], [0, 1]), 9: (images[2:], [1, 0])})
    jax.tree.map(
        np.testing.assert_array_equal, column.train.examples, listed.train.examples
    )
    inputs, labels = listed.train.rows(1)
    assert inputs.shape == (2, 2, 2, 3) and column.names == ("7", "9")
    found = dict(zip(labels.tolist(), inputs[:, 0, 0, 0].tolist(), strict=True))
    assert found == pytest.approx({1: 102 / 255, 0: 153 / 255})


def test_hugging_face_and_flower_themselves():
    datasets = pytest.importorskip("datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    columns = {"x": X.tolist(), "label": Y.tolist(), "who": OWNERS}
    features = {
        "x": datasets.List(datasets.Value("float32")),
        "label": datasets.ClassLabel(names=NAMES),
        "who": datasets.Value("string"),
    }
    rows = datasets.Dataset.from_dict(columns, datasets.Features(features))
    natural = partitioner.NaturalIdPartitioner(partition_by="who")
    natural.dataset = rows
    wanted = DATA["client column"]()
    for source in (rows, natural):
        found = fb.federate(source, client="who", test=0.3)
        assert found.names == wanted.names and found.label_names == tuple(NAMES)
        pair = found.train.examples, wanted.train.examples
        jax.tree.map(np.testing.assert_array_equal, *pair)


NAN = np.where(X == 5, np.nan, X)
TEXTS = np.array(["a"] * 6)
WRONG: dict[str, tuple[str, Any]] = {
    "unequal lengths": ("client '1': 6 rows of inputs, but 5 targets", (X, Y[:5])),
    "NaN": ("client '1': inputs: row 2 .* column 1 is nan; only finite", (NAN, Y)),
    "infinite": ("client '1': targets: row 5 .* is inf", (X, [0.5] * 5 + [np.inf])),
    "objects": ("client '1': inputs: {} is not made of numbers", ([{}] * 6, Y)),
    "object array": (
        "client '1': inputs: {} is not made of numbers",
        (np.array([{}] * 6, object), Y),
    ),
    "ragged": (
        r"client '1': inputs: row 1 is of shape \(1,\), and row 0 of \(2,\)",
        ([[1, 2], [3]], [0, 1]),
    ),
    "ragged labels": ("client '1': labels: row 1 is of shape", (X[:2], [[1], [1, 2]])),
    "empty": ("no rows of the clients '1'$", (X[:0], Y[:0])),
    "no labels": ("client '1': labels: None is not made of numbers", (X, None)),
    "missing label": ("client '1': labels: .* is not made of", (X[:2], ["a", None])),
    "an array": ("client '1': .* is not .inputs, labels., nor a Dataset", X),
    "three arrays": ("client '1': .* is not .inputs, labels., nor", (X, Y, Y)),
    "a mapping": ("client '1': .* is not .inputs, labels., nor", {"x": X, "y": Y}),
    "a text": ("client '1': 'ward.csv' is not .inputs, labels., nor", "ward.csv"),
    "a number": ("client '1': 3 is not .inputs, labels., nor", 3),
    "texts": ("client '1': inputs: .* is not made of numbers, an entry", (TEXTS, Y)),
    "negative": ("client '1': label: -1 is not a class number, from 0", (X, Y - 1)),
    "narrow": (r"client '1': shapes .*\(\(1,\), \(\), False\)", (X[:, :1], Y)),
    "wide labels": (r"client '1': shapes .*\(\(2,\), \(2,\), Fa", (X, np.c_[Y, Y])),
    "text labels": (r"client '1': shapes .*\(\(2,\), \(\), True\)", (X, TEXTS)),
    "scalars": ("client '1': inputs: 3.0 is not made of numbers", (3.0, 4)),
    "dates": ("client '1': inputs: .* is not", (X.astype("datetime64[s]"), Y)),
    "complex": ("client '1': inputs: .* is not made of numbers", (X * 1j, Y)),
    "bytes": ("client '1': labels: .* is not made", (X[:2], [b"a", b"b"])),
    "rows alone": (
        "client '1': .* is not a pair of inputs and label",
        StandIn({"x": X, "z": X, "label": Y}, "custom"),
    ),
}
WHOLE: dict[str, tuple[str, Any]] = {
    "flat arrays": ("client '0': .* flat arrays need a partition", lambda: (X, Y)),
    "nothing": ("rows: None is not a list or mapping of clients", lambda: None),
    "no clients": (r"rows: \[\] is not a list or mapping", list),
    "a file": ("visits.csv: has no images client/class", lambda: "visits.csv"),
    "one class": ("all 6 targets are a; at least 2", lambda: [(X, TEXTS)]),
    "no client column": ("client: there is no column 'None'", table),
    "a torch Dataset": ("rows: .* is not a list", lambda: torch_data()[1][0]),
}


def refused(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value) and str(caught.value).startswith("federate: ")


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_client_is_refused_in_one_line(what):
    words, client = WRONG[what]
    refused(lambda: fb.federate([(X, Y), client]), words)


@pytest.mark.parametrize("what", WHOLE)
def test_what_is_no_clients_is_refused_in_one_line(what):
    words, source = WHOLE[what]
    refused(lambda: fb.federate(source()), words)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("target: there is no column 'y'; there are x, label, who", {"target": "y"}),
        ("inputs: there is no column 'z'", {"inputs": "z"}),
        ("client: there is no column 'me'", {"client": "me"}),
        ("inputs: .* is not made of numbers", {"inputs": "who"}),
        ("client: 'x' is not a column with an integer or a text", {"client": "x"}),
        ("kind: 'counts' is not 'classes' or 'regr", {"kind": "counts"}),
    ],
)
def test_a_wrong_column_is_refused_in_one_line(words, more):
    refused(lambda: fb.federate(table(), **{"client": "who"} | more), words)


@pytest.mark.parametrize("labels", [TEXTS, np.array([{}] * 6, object)])
def test_flat_arrays_are_numbers(labels):
    refused(lambda: fb.federate((X, labels), PARTS), "rows: .* is not made of numbers")


def test_a_dataset_keeps_the_names_of_its_classes():
    columns = {"a": [1.0, 2.0, 3.0, 5.0], "y": ["no", "yes", "no", "yes"]}
    dataset = fb.data.read(columns, target="y")
    data = fb.data.federate_dataset(dataset, fb.partition.contiguous(4, 2))
    assert data.label_names == data.select([1]).label_names == ("no", "yes")


def test_images_of_two_sizes_and_damaged_ones_are_refused(tmp_path):
    save_image(tmp_path / "a/cat/1.png", 1)
    save_image(tmp_path / "a/dog/2.png", 1, (5, 4))
    refused(lambda: fb.federate(tmp_path), "2.png is of shape .* all need one shape")
    (tmp_path / "a/dog/2.png").write_text("no image")
    with pytest.raises(InputError, match=r"2.png: is damaged, or no image$"):
        fb.federate(tmp_path)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (Y[:, None], "an array int64 of shape (6, 1) is not class numbers"),
        (Y * 1.0, "an array float64 of shape (6,) is not class numbers (integers)"),
        (Y + 1, "3 is not a class of the model, 0 to 2"),
        (Y - 1, "-1 is not a class of the model, 0 to 2"),
    ],
)
def test_labels_that_are_no_classes_of_the_model_are_refused(targets, words):
    loss = fb.losses.cross_entropy(lambda params, inputs: inputs @ params)
    with pytest.raises(
        InputError, match=f"^cross_entropy: targets: {re.escape(words)}"
    ):
        loss(np.ones((2, 3), np.float32), (X, targets))
