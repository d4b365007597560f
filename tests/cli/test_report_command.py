# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend report``."""

import json
import webbrowser
from pathlib import Path

import pytest

from fedblend.cli import main
from synthetic_run import write_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(Path("runs") / "made", names={4: "north wing"}).path


def test_the_report_goes_into_the_folder(folder: Path, capsys):
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == f"report: {folder / 'report.html'}"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_and_a_named_file(folder: Path):
    other = write_run(Path("runs") / "other", name="other").path
    out = Path("deep") / "all.html"
    assert main(["report", str(folder), str(other), "--out", str(out)]) == 0
    assert main(["report", str(folder), str(other)]) == 0
    assert out.is_file() and Path("report.html").is_file()


def test_a_client_gets_a_file_of_its_own(folder: Path):
    assert main(["report", str(folder), "--client", "north wing"]) == 0
    assert (folder / "report-north-wing.html").is_file()


def test_the_browser_is_asked_to_open_it(folder: Path, monkeypatch, capsys):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)))
    assert main(["report", str(folder), "--open"]) == 0
    assert opened == [(folder / "report.html").resolve().as_uri()]
    assert "no browser was found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "error: nowhere: is not the folder of a run (no config.toml)"),
        (["runs/made", "--client", "x"], "error: runs/made: has no client 'x'"),
        (["runs/made", "--out", "runs"], "error: --out: runs is a folder"),
    ],
)
def test_bad_input_is_one_line(folder: Path, capsys, words: list[str], line: str):
    assert main(["report", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(line) and "\n" not in said


def test_show_of_auto_prints_methods_and_verdict(tmp_path: Path, capsys):
    """Also where nothing is to be deployed; an unfinished comparison is one line."""
    found = {"title": "local only", "setting": {"l2": 0.1}, "validation": 0.4}
    found |= {"metrics": {"log_loss": 0.4, "auc": 0.8}, "test": 0.4, "seconds": 1.0}
    state = {"deploy": None, "verdict": ["Deploy nothing yet."], "metric": "log_loss"}
    state["methods"] = {"local_only": found}
    (tmp_path / "auto.json").write_text(json.dumps(state))
    assert main(["show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "local only" in said and "Deploy nothing yet." in said
    (tmp_path / "auto.json").write_text(json.dumps({"methods": {}}))
    assert main(["show", str(tmp_path)]) == 2
    assert "this comparison is not finished" in capsys.readouterr().err
