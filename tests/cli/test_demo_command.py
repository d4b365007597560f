# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The example table: ``fedblend data example`` writes it, ``fedblend demo`` uses it."""

import csv

import pytest

import fedblend.cli.auto
from fedblend.cli import main


def test_the_example_is_written_once(tmp_path, capsys):
    path = tmp_path / "some.csv"
    assert main(["data", "example", str(path)]) == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 920 and {row["disease"] for row in rows} == {"yes", "no"}
    assert len({row["center"] for row in rows}) == 4
    assert "CC BY 4.0" in capsys.readouterr().out
    assert main(["data", "example", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["data", "example", str(tmp_path / "some.xlsx")]) == 2


def test_the_license_of_the_example_is_beside_it():
    said = fedblend.cli.auto.HEART.with_name("heart.license.txt").read_text()
    assert "CC BY 4.0" in said and "Janosi" in said


def test_the_demo_is_auto_on_the_example(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        fedblend.cli.auto, "auto", lambda table, **more: asked.append((table, more))
    )
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    ((table, more),) = asked
    assert table == fedblend.cli.auto.HEART
    assert more == {"client": "center", "target": "disease", "out": tmp_path / "out"}


@pytest.mark.slow
def test_the_demo_ends_with_a_page(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    assert "Train alone: " in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").is_file()
