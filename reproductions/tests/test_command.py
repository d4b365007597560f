# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend reproduce``: what it writes, and how it refuses bad input."""

import json
import subprocess
import sys

import pytest

from fedblend.cli import main
from fedblend.data.dataset import DataError
from fedblend_reproductions import flix
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Verdict


def small(quick):
    return Finding(Verdict.reproduced, f"quick is {quick}", {"one": 1}, {})


def headline(numbers):
    return f"It is {numbers['one']}"


def without_data(quick):
    raise DataError("w6a: is not there; get it with: fedblend data get w6a")


@pytest.fixture
def claims(monkeypatch):
    known = (
        Claim("F1", "First", "it holds", small, headline),
        Claim("F2", "Second", "it needs data", without_data, headline),
        Claim("F10", "Third", "it holds, too", small, headline, "2"),
    )
    monkeypatch.setattr(flix, "CLAIMS", known)


def test_the_claims_are_those_of_the_ledger():
    names = [claim.name for claim in flix.CLAIMS]
    assert names == [*(f"F{i}" for i in range(1, 9)), "F9a", "F9b", "F10", "F11"]
    assert all(claim.title and claim.paper for claim in flix.CLAIMS)


def test_a_page_of_all_that_was_measured(claims, tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert main(["reproduce", "flix", "f10", "--quick", *out]) == 0
    assert main(["reproduce", "flix", "F1", *out]) == 0
    shown = capsys.readouterr()
    assert "It is 1" in shown.out
    assert "F1: First" in shown.err
    found = json.loads((tmp_path / "flix" / "F10.json").read_text())
    assert (found["quick"], found["ours"]) == (True, "quick is True")
    page = (tmp_path / "flix.md").read_text()
    assert page.index("| F1 First |") < page.index("| F10 Third |")


def test_the_papers_sizes_are_on_the_same_page(claims, tmp_path, monkeypatch):
    large = (Claim("F1", "First", "it holds", lambda _: small("large"), headline),)
    monkeypatch.setattr(flix, "PAPER_SIZED", large, raising=False)
    out = ["--out", str(tmp_path)]
    assert main(["reproduce", "flix", "--paper-sized", *out]) == 0
    assert main(["reproduce", "flix", "F10", *out]) == 0
    page = (tmp_path / "flix.md").read_text()
    assert "quick is large" in page and "## F10 Third" in page
    assert "| F1 paper-sized: First |" in page
    assert [path.name for path in (tmp_path / "flix_paper_sized").iterdir()] == [
        "F1.json"
    ]


@pytest.mark.parametrize(
    ("paper", "other", "reason"),
    [
        ("flix", [], "flix has no such claims"),
        ("mixed", ["--quick"], "not for --quick"),
    ],
)
def test_sizes_that_cannot_be_are_one_line(paper, other, reason, tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert main(["reproduce", paper, "--paper-sized", *other, *out]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--paper-sized: " in line and reason in line
    assert not list(tmp_path.iterdir())


def test_missing_data_is_one_line_and_loses_nothing(claims, tmp_path, capsys):
    assert main(["reproduce", "flix", "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: w6a: is not there")
    assert (tmp_path / "flix" / "F1.json").exists()
    assert not (tmp_path / "flix" / "F2.json").exists()
    assert "| F1 First |" in (tmp_path / "flix.md").read_text()


def test_an_unknown_claim_is_one_line(claims, tmp_path, capsys):
    assert main(["reproduce", "flix", "F99", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "'F99' is none of F1, F2, F10" in line


def test_the_page_alone_is_written_from_what_was_measured(claims, tmp_path, capsys):
    assert main(["reproduce", "flix", "--page", "--out", str(tmp_path)]) == 2
    assert "--page: " in capsys.readouterr().err
    assert main(["reproduce", "flix", "F1", "--out", str(tmp_path)]) == 0
    wanted = (tmp_path / "flix.md").read_text()
    (tmp_path / "flix.md").unlink()
    assert main(["reproduce", "flix", "--page", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "flix.md").read_text() == wanted


def test_a_claim_without_parts_is_none_of_the_cached(claims, tmp_path, capsys):
    assert main(["reproduce", "flix", "F1", "--cached", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--cached: F1 caches no parts" in line
    assert not (tmp_path / "flix").exists()


def test_old_names_of_the_cache_are_one_line(claims, tmp_path, capsys):
    assert main(["reproduce", "flix", "F1", "--kept", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--kept: is called --cached now" in line
    (tmp_path / "flix" / "kept").mkdir(parents=True)
    assert main(["reproduce", "flix", "F1", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"rename {tmp_path / 'flix' / 'kept'} to" in line


def test_a_part_that_is_not_cached_is_one_line(claims, tmp_path, monkeypatch, capsys):
    def check(quick, folder):
        return small(Cache(folder, {})("part", list))

    known = (Claim("F3", "Long", "it holds", check, headline, resumable=True),)
    monkeypatch.setattr(flix, "CLAIMS", known)
    assert main(["reproduce", "flix", "--cached", "--out", str(tmp_path)]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "part.json: is not there" in line


def test_the_package_is_a_command_where_nothing_is_installed(tmp_path):
    command = [sys.executable, "-m", "fedblend_reproductions", "flix", "F99"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "'F99' is none of F1, F2" in line
