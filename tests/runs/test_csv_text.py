# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Names from others are no formulas in the tables that people open."""

import csv
import io

import pytest

from fedblend.runs.run_folder import csv_text, write_table

BAD = ['=HYPERLINK("http://a","b")', "+1+cmd", "-2+3", "@SUM(A1)"]


@pytest.mark.parametrize("name", BAD)
def test_a_text_that_begins_as_a_formula_gets_an_apostrophe(name, tmp_path):
    write_table(tmp_path / "clients.csv", [{"client": name, name: 1.5}])
    text = (tmp_path / "clients.csv").read_bytes().decode()
    header, row = csv.reader(io.StringIO(text, newline=""))
    assert header == ["client", f"'{name}"] and row == [f"'{name}", "1.5"]


def test_numbers_and_other_texts_stay():
    cells = ["-1.5", "+3", "-inf", -2.5, 1, None, "a=b", "hospital 3", ""]
    shown = ["-1.5", "+3", "-inf", "-2.5", "1", "", "a=b", "hospital 3", ""]
    text = csv_text(map(str, range(9)), [cells])
    assert [*csv.reader(io.StringIO(text))][1] == shown
