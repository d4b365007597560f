# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows held out by time and by groups, and numbers that mean a missing value."""

import numpy as np
import pytest

import fedblend as fb
from fedblend.config.build import build
from fedblend.config.config import load
from fedblend.data.dataset import DataError
from fedblend.data.preprocess import schema_of
from fedblend.data.preprocess.preprocessing import Preprocessing, fit

PARTS = ("train", "validation", "test")


def table(rows=400, clients=4, seed=0):
    """Visits of patients: a year that no other visit of the clinic has."""
    draw = np.random.default_rng(seed)
    patient = draw.integers(0, rows // 4, rows)
    return {
        "clinic": np.array([f"clinic {number}" for number in patient % clients]),
        "year": draw.permutation(rows),
        "patient": patient,
        "x": draw.normal(size=rows),
        "y": draw.choice(["ill", "well"], rows),
    }


def federations(columns, tmp_path, seeds, **data):
    """The splits of a configuration, as ``fedblend run`` makes them."""
    path = tmp_path / "table.csv"
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in [columns, *rows]))
    known = {"file": str(path), "client": "clinic", "target": "y", **data}
    lines = [f"{key} = {value!r}" for key, value in known.items()]
    text = "\n".join(["version = 1", "[data]", *lines, "validation = 0.2"])
    config = tmp_path / "config.toml"
    config.write_text(
        f'{text}\n[algorithm]\nname = "fedavg"\n[run]\nrounds = 1\nseed = {seeds}\n'
    )
    return build(load(config)).federations


def values_of(one, column, client):
    """What a column of the table is in the rows of each part of a client."""
    return [
        column[one.splits[name].origin[window(one.splits[name], client)]]
        for name in PARTS
    ]


def window(split, client):
    return slice(split.starts[client], split.starts[client] + split.counts[client])


def test_by_time_the_past_trains_and_each_split_ends_earlier(tmp_path):
    columns = table()
    found = federations(columns, tmp_path, [5, 9, 2], time="year", drop=["year"])
    assert len(found) == 3
    for client in range(4):
        mine = np.sort(columns["year"][columns["patient"] % 4 == client])
        number = round(len(mine) * 0.2)
        for split, one in enumerate(found):
            train, validation, test = values_of(one, columns["year"], client)
            assert train.max() < validation.min() and validation.max() < test.min()
            end = len(mine) - split * number
            assert sorted(test) == mine[end - number : end].tolist()
        sizes = {len(values_of(one, columns["year"], client)[0]) for one in found}
        assert sizes == {len(mine) - 4 * number}


def test_one_split_by_time_trains_on_all_rows_before(tmp_path):
    columns = table()
    (one,) = federations(columns, tmp_path, 7, time="year")
    assert sum(one.splits[name].total for name in PARTS) == 400


def test_rows_of_a_group_are_in_one_part(tmp_path):
    columns = table()
    found = federations(columns, tmp_path, [0, 1, 2], group="patient")
    fitted = found[0].preprocessing
    assert fitted is not None and "patient" not in fitted.columns
    tested = []
    for one in found:
        for client in range(4):
            parts = [set(part) for part in values_of(one, columns["patient"], client)]
            assert not (
                parts[0] & parts[1] or parts[1] & parts[2] or parts[0] & parts[2]
            )
            tested.append(frozenset(parts[2]))
        held = [one.splits[name].total for name in PARTS]
        assert held[1] == pytest.approx(80, abs=3) and held[2] == pytest.approx(
            80, abs=3
        )
        assert held[0] > 400 - 160 - 4 * 2 * 8
    assert len(set(tested)) > 4
    assert len({tuple(one.train.counts) for one in found}) == 1


@pytest.mark.parametrize(
    "sizes", [[5], [1, 9], [40, 1, 1, 1], [3, 3, 3, 3, 3], [1] * 10]
)
def test_every_client_trains_however_its_groups_are(sizes):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.arange(len(groups))
    for split in range(5):
        held = {"validation": 0.2, "test": 0.2, "split": split, "groups": groups}
        data = fb.federate(rows, [rows], **held)
        parts = [set(groups[part.rows(0)]) for part in data.splits.values()]
        assert parts[0] and not (parts[0] & parts[1] or parts[0] & parts[2])
        assert data.splits["test"].total <= round(0.2 * len(rows))


def test_numbers_that_mean_missing_are_missing_in_new_rows_too():
    draw = np.random.default_rng(0)
    weight = np.where(draw.random(200) < 0.1, 999, draw.normal(70, 9, 200).round())
    texts = np.array([f"{one:g} " for one in weight], object)
    for raw in (weight, weight.astype(int), texts):
        schema = schema_of({"weight": raw}, {"weight": "missing 999"})
        fitted = fit(schema, [schema.encode({"weight": raw})])
        assert fitted.fitted[0].mean == pytest.approx(weight[weight < 999].mean())
        again = Preprocessing.parse(fitted.dump())
        new = again.transform({"weight": np.array([999, 70])})
        assert new[0].tolist() == [0.0, 1.0] and new[1, 1] == 0
        assert "999 read as missing" in fitted.describe()[0]["done"]


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"time": "when"}, "there is no column 'when'"),
        ({"time": "sex"}, "time: f is no number and no date"),
        ({"group": "y"}, "group: 'y' is the target or client"),
        ({"time": "year", "group": "patient"}, "time and group: choose one"),
        ({"preprocess": {"year": "missing x"}}, "preprocess.year: 'x' are no numbers"),
        (
            {"preprocess": {"sex": "missing 0"}},
            "preprocess.sex: missing 0 needs numbers",
        ),
        ({"client": "y"}, "client: 'y' is the target, too; name the column"),
    ],
)
def test_what_cannot_be_is_one_line(asked, line):
    columns = {**table(), "sex": np.array(["f", "m"] * 200)}
    with pytest.raises(DataError, match=line):
        fb.data.read(columns, **{"target": "y", "client": "clinic", **asked})
