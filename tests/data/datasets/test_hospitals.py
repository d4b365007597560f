# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The made-up hospitals: the same table for the same seed, raw, and as described."""

import csv

import numpy as np
from sklearn.linear_model import LogisticRegression

from fedblend.cli import main
from fedblend.data.datasets.hospitals import OTHER_SCALES, hospitals


def test_same_seed_same_table():
    one, two, other = hospitals(3, 50), hospitals(3, 50), hospitals(3, 50, seed=1)
    assert all((one[name] == two[name]).all() for name in one)
    assert not (one["age"] == other["age"]).all()


def test_table_is_raw():
    table = hospitals()
    assert {len(values) for values in table.values()} == {20 * 500}
    missing = {name: np.mean(v == None) for name, v in table.items()}  # noqa: E711
    assert 0.2 < missing["lactate"] < 0.35 and missing["age"] == 0
    assert 0.1 < np.mean(table["outcome"] == "died") < 0.2
    assert set(map(type, table["ward"])) == {str}


def test_one_hospital_is_unlike_the_others():
    """The slope of lactate, by scikit-learn, has the other sign there."""
    table = hospitals()
    known = table["lactate"] != None  # noqa: E711
    there = table["hospital"] == OTHER_SCALES

    def slope(mine):
        values = table["lactate"][mine].astype(float).reshape(-1, 1)
        fit = LogisticRegression().fit(values, table["outcome"][mine] == "died")
        return fit.coef_[0, 0]

    assert slope(known & there) < -0.1 < 0.1 < slope(known & ~there)


def test_command_writes_a_table_once(tmp_path, capsys):
    path = tmp_path / "some.csv"
    assert main(["data", "example", str(path), "--clients", "2", "--rows", "20"]) == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40 and len({row["hospital"] for row in rows}) == 2
    assert main(["data", "example", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["data", "example", str(tmp_path / "some.xlsx")]) == 2
