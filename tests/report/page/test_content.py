# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a page holds of run folders, whole or damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedblend.errors import RunError
from fedblend.report.clients import STATUS, plain_clients, read_clients
from fedblend.report.page.content import page_content
from fedblend.report.series import column, learning_curves
from synthetic_run import write_run


def test_clients_are_counted_as_the_summary_counts_them(run_folder: Path):
    content = page_content([run_folder])
    run = content["runs"][0]
    counted = [run["clients"]["status"].count(place) for place in range(len(STATUS))]
    gain = run["headline"]["gain"]
    assert counted[STATUS.index("harmed")] == gain["count"] == 3
    assert counted[STATUS.index("gains")] == gain["helped"]
    assert sum(counted) == gain["clients"] == 30


def test_columns_beyond_the_room_are_left_out_and_named(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    clients = read_clients(folder)
    assert clients is not None
    found = plain_clients(clients, 30 * 11, ["test_personal_accuracy"])
    kept = {"train", "alpha", "test", "test_personal_accuracy"}
    assert kept <= set(found["columns"])
    assert found["left_out"] and set(found["left_out"]).isdisjoint(found["columns"])
    assert set(found["left_out"]) | set(found["columns"]) == set(clients.columns)


def test_a_column_is_rounded_as_python_rounds():
    values = np.array([0.65625, 0.96875, 0.12345, -0.00005, np.nan, 2.0])
    found = column(values)
    shown = [None if v is None else f"{v / 10 ** found['d']:.4f}" for v in found["v"]]
    assert shown[:3] == [f"{value:.4f}" for value in values[:3]]
    assert shown[4:] == [None, "2.0000"]


def test_long_curves_keep_both_ends(tmp_path: Path):
    rows = [
        json.loads(line)
        for line in write_run(tmp_path / "run", rounds=90)
        .metrics.read_text()
        .splitlines()
    ]
    found = learning_curves(rows, 10)
    assert len(found["round"]) == 10
    assert (found["round"][0], found["round"][-1]) == (0, 90)
    line = next(one for one in found["lines"] if one["model"] == "local")
    assert len(line["v"]) == 10 and "low" not in line


def test_seeds_have_a_band(run_folder: Path):
    lines = page_content([run_folder])["runs"][0]["curves"]["lines"]
    means = [line for line in lines if line["of"] == "mean"]
    assert len(means) == 12
    for line in means:
        band = zip(line["low"], line["v"], line["high"], strict=True)
        assert all(low <= value <= high for low, value, high in band)


def test_a_folder_of_runs_stands_for_its_runs(tmp_path: Path):
    for name in ("a", "b"):
        write_run(tmp_path / "out" / "runs" / name, name=name)
    assert [run["label"] for run in page_content([tmp_path / "out"])["runs"]] == [
        "a",
        "b",
    ]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path):
    folders = [write_run(tmp_path / name).path for name in ("a", "b")]
    assert [run["label"] for run in page_content(folders)["runs"]] == ["a", "b"]


def test_a_run_that_goes_on_has_curves_and_no_verdict(tmp_path: Path):
    folder = write_run(tmp_path / "run", finished=False)
    content = page_content([folder.path])
    assert "not finished" in content["verdict"][0]
    assert content["runs"][0]["curves"]["round"][-1] == 20
    assert content["runs"][0]["clients"] is None


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(
        RunError, match=r"is not the folder of a run \(no config.toml\)"
    ):
        page_content([tmp_path])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.toml", "name = "),
        ("summary.json", '{"runs": [{"measures": 3}]}'),
        ("summary.json", "[]"),
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", "nothing"),
        ("clients.csv", "seed,id\n0\n"),
        ("clients.csv", "seed,name\n0,a\n"),
        ("clients.csv", "seed,id,name\n0,x,a\n"),
        ("harm.csv", "id,gain_over_local\n0,0.5\n"),
        ("harm.csv", "id,gain_over_local,gain_low,gain_high,harmed\n0,x,,,no\n"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, file: str, text: str):
    folder = write_run(tmp_path / "run").path
    (folder / file).write_text(text)
    with pytest.raises(RunError) as error:
        page_content([folder])
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_what_was_done_to_columns_is_shown(tmp_path: Path):
    folder = write_run(tmp_path / "run").path
    column = {"name": "age", "kind": "number", "seen": "3 missing", "done": "as it is"}
    kept = {"format": "1", "columns": [{**column, "fitted": {"mean": 3}}]}
    (folder / "preprocessing-seed0.json").write_text(json.dumps(kept))
    assert page_content([folder])["runs"][0]["columns"] == [column]


def test_runs_that_cannot_be_compared_are_not_praised(tmp_path: Path):
    """These lack the rows' evidence; the page says so, and claims nothing."""
    folders = [write_run(tmp_path / name, name=name).path for name in ("a", "b")]
    content = page_content(folders)
    assert content["tone"] == "open" and content["differences"] == []
    assert content["verdict"][-1].startswith("Differences are not tested: ")
