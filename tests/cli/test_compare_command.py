# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend compare`` and ``fedblend sweep``: what they print and what they refuse."""

from copy import deepcopy
from pathlib import Path

import pytest

from fedblend.cli import main, screen
from fedblend.config import toml
from tiny_config import TINY

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    content = deepcopy(TINY)
    content["data"]["validation"] = 0.2
    content["run"] |= {"rounds": 1, "every": 1}
    Path("tiny.toml").write_text(toml.write(content))


def test_a_sweep_and_a_comparison_of_its_runs(capsys):
    over = ["--over", "algorithm.rate=0.01,0.3"]
    assert main(["sweep", "tiny.toml", *over, "--out", "out"]) == 0
    said = capsys.readouterr().out
    for part in ("rate=0.01", "rate=0.3", "test accuracy (%)", "results: out"):
        assert part in said
    assert "best on validation rows: rate=0." in said
    assert main(["sweep", "tiny.toml", *over, "--out", "out"]) == 2
    assert "out: holds a sweep already; --resume" in capsys.readouterr().err
    again = ["sweep", "tiny.toml", *over, "--out", "out", "--resume"]
    assert main([*again, "--table", "markdown"]) == 0
    assert capsys.readouterr().out == Path("out/table.md").read_text()
    runs = ["out/runs/rate=0.01", "out/runs/rate=0.3"]
    target = ["--target", "loss=0", "--metric", "accuracy", "--metric", "loss"]
    assert main(["compare", *runs, "--out", "both", "--table", "latex", *target]) == 0
    printed = capsys.readouterr().out
    assert printed == Path("both/table.tex").read_text()
    assert "not reached" in printed and r"\toprule" in printed
    assert Path("both/differences.csv").read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sweep", "tiny.toml"], "Missing option"),
        (
            ["sweep", "tiny.toml", "--over", "algorithm.rat=1,2"],
            "tiny.toml: algorithm.rat: unknown key; did you mean 'rate'?",
        ),
        (
            ["sweep", "tiny.toml", "--over", "algorithm.rate=1:0:1"],
            "--over algorithm.rate=1:0:1: the range is empty",
        ),
        (["compare", "none.toml"], "none.toml: No such file or directory"),
        (["compare", "tiny.toml", "--target", "accuracy"], "--target: 'accuracy' is"),
        (["compare", "tiny.toml", "--seeds", "0"], "--seeds: 0 is not 1 or more"),
        (["compare", "."], "summary.json: No such file or directory"),
    ],
)
def test_what_is_refused(arguments, line, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
    assert not Path("runs").exists()
