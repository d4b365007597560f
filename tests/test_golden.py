# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The library computes and says what tools/golden.json has."""

import copy
import subprocess
import sys
from typing import Any

import golden
import pytest

RECORD = golden.recorded()
FEW = ("names", "algorithm/apfl/", "algorithm/fedavg/", "algorithm/scaffold/")
NUMBERS: Any = {"sha256": "a", "sketch": [2.0, 1.0, 400.0, -7.0]}
"""An entry of two columns."""


@pytest.mark.parametrize("name", FEW)
def test_a_few_entries_have_not_moved(name):
    assert any(entry.startswith(name) for entry in RECORD)
    # Another processor may round otherwise.
    lines = golden.compare(RECORD, name)
    assert [line for line in lines if ": exact only: " not in line] == []


def test_every_algorithm_and_transform_is_recorded():
    kinds = {tuple(name.split("/")[:2]) for name in RECORD}
    assert {name for kind, name in kinds if kind == "algorithm"} == {*golden.ALGORITHMS}
    over = {f"{name}({base})" for name in golden.TRANSFORMS for base in golden.BASES}
    assert {name for kind, name in kinds if kind == "transform"} == over


def test_what_was_tampered_with_is_found():
    record = copy.deepcopy(RECORD)
    names = record["names/fedblend"]
    record |= {"names/fedblend": f"{names} frob", "names/other": "old"}
    found = golden.compare(record, "names")
    assert [line.partition("\n")[0] for line in found] == [
        "names/fedblend: text",
        "names/other: gone",
    ]
    assert " frob" in found[0]
    del record["names/fedblend"]
    assert golden.compare(record, "names/fedblend") == ["names/fedblend: new"]


@pytest.mark.parametrize(
    ("sketch", "line"),
    [
        ([2.0, 1.0, 400.0, -7.0], "exact only: 0 of the norm"),
        ([2.0, 1.000001, 400.0, -7.0], "exact only: 5e-07 of the norm"),
        ([2.0, 1.001, 400.0, -7.0], "values: 0.0005 of the norm"),
        ([2.0, 1.0], "values: arrays came or went"),
    ],
)
def test_rounding_is_told_from_values(sketch, line):
    assert golden.difference(NUMBERS, {"sha256": "b", "sketch": sketch}) == line
    assert golden.difference(NUMBERS, copy.deepcopy(NUMBERS)) == ""


def test_an_entry_that_cannot_be_computed_stops_no_other(monkeypatch, capsys):
    def broken():
        raise RuntimeError("first line\nsecond line")

    def absent():
        raise golden.Absent("no table")

    jobs = {"names": golden.names, "one": broken, "two": absent}
    monkeypatch.setattr(golden, "jobs", lambda: jobs)
    record = {"names/fedblend": RECORD["names/fedblend"], "one/a": "x", "two": "y"}
    lines = golden.compare(record)
    assert lines == ["one: not computed, RuntimeError: first line"]
    assert capsys.readouterr().out == "two: left out, no table\n"


@pytest.mark.slow
def test_nothing_has_moved():
    """In a process of its own, as the commands change where JAX keeps programs."""
    done = subprocess.run(
        [sys.executable, str(golden.HOME / "tools" / "golden.py"), "compare"],
        capture_output=True,
        text=True,
    )
    *lines, count = done.stdout.splitlines()
    moved = [
        line for line in lines if not (": exact only: " in line or ": left" in line)
    ]
    assert moved == [], done.stderr[-500:]
    assert count.endswith(" moved or not computed"), done.stderr[-500:]
