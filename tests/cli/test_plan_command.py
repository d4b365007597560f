# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend plan``: what it prints, what its command does, and what it refuses."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main, screen
from fedblend.config import toml
from fedblend.runs.plan.candidates import Prices
from fedblend.simulation.serialize import unpack
from planned import DIANA, FLIX, ByHand, changed


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "compile_cache", lambda: None)
    return tmp_path


def write(content: dict) -> str:
    Path("flix.toml").write_text(toml.write(content))
    return "flix.toml"


EPS = 1e-6


@pytest.mark.slow
def test_the_commands_do_what_was_promised(place, capsys, compiled):
    """Those of all solvers with typical rounds, in bits each way and accuracy."""
    by_hand = ByHand()
    file = write(changed(FLIX, "algorithm.rate=0.1", "algorithm.alpha=0.9"))
    asked = ["--alpha", "0.5", "--eps", f"{EPS}", "--format", "json"]
    assert main(["plan", file, *asked, "--up", "1", "--down", "0.1"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    rows = json.loads(said.out)["rows"]
    tried = [row for row in rows if row["median_rounds"]]
    assert rows[0] in tried
    for row in rows:
        assert row["certified_rounds"] <= row["worst_rounds"]
        cost = row["certified_up"] + 0.1 * row["certified_down"]
        assert row["certified_cost"] == cost
        assert (row["median_cost"] is None) == (row["more_than"] is not None)
    for number, row in enumerate(tried):
        assert row["median_rounds"] <= row["p90_rounds"] < row["certified_rounds"]
        assert row["median_cost"] == row["median_up"] + 0.1 * row["median_down"]
        words = [*shlex.split(row["command"]), "--out", f"runs/{number}"]
        assert words[:2] == ["fedblend", "run"]
        assert main(words[1:]) == 0
        capsys.readouterr()
        leaves, _ = unpack(Path(f"runs/{number}/model.safetensors").read_bytes())
        shared = np.concatenate([leaves[".weight"].ravel(), leaves[".bias"]])
        summary = json.loads(Path(f"runs/{number}/summary.json").read_text())
        run = summary["runs"][0]
        rounds = run["round"] + 1
        assert rounds <= row["p90_rounds"]
        gap = by_hand.value(0.5, shared) - by_hand.least(0.5)
        assert -1e-12 <= gap <= run["certificate"]["gap"]
        assert run["certificate"]["gap"] <= EPS or rounds == row["p90_rounds"]
        for way, more in (("up", 0), ("down", run["bits"]["last_broadcast"])):
            least, most = (row[f"{name}_{way}"] for name in ("median", "certified"))
            apart = row["certified_rounds"] - row["median_rounds"]
            later = (rounds - row["median_rounds"]) * (most - least) / apart
            assert run["bits"][way] + more == pytest.approx(least + later)
    assert len({row["solver"] for row in tried}) > 1


def test_what_is_printed(place, capsys, compiled, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    file = write(DIANA)
    assert main(["plan", file]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 90
    assert said.count("DGD  ") == said.count("DIANA of") == 10
    assert "31 parameters" in said
    asked = ["--no-trials", "--set", "run.seed=[1, 2]"]
    prices = ["--up", "1", "--down", "0.5"]
    assert main(["plan", file, "--bits", "3e7", *asked, *prices]) == 0
    said = capsys.readouterr().out
    assert "Cost: up 1, down 0.5" in said
    assert "leave the table [compress] out" in said
    file = write(FLIX)
    assert main(["plan", file, "--rounds", "30", *asked]) == 0
    said = capsys.readouterr().out
    first = "to run the first: fedblend run flix.toml --set 'run.seed=[1, 2]' --set "
    assert first in said
    order = [said.index(of) for of in ("accelerated", "DGD", "DIANA rand-1 ")]
    assert order == sorted(order)


ROW = {
    "solver": "dgd", "options": "", "name": "DGD", "random": False, "alpha": 0.5,
    "worst_rounds": 90, "certified_rounds": 80, "certified_up": 8e3,
    "certified_down": 8e3, "certified_cost": 16e3, "median_rounds": None,
    "median_up": None, "median_down": None, "median_cost": None, "p90_rounds": None,
    "more_than": 11, "bits_at_most": False, "bound": 1e-3, "settings": [],
}  # fmt: skip
FIRST = {
    **ROW, "solver": "scafflix", "name": "Scafflix 1/p = 9", "certified_cost": 40e3,
    "median_rounds": 5, "median_up": 1e3, "median_down": 1e3, "median_cost": 4e3,
    "p90_rounds": 7, "more_than": None, "settings": ["run.rounds=6"],
}  # fmt: skip


@pytest.fixture
def planned(monkeypatch):
    """A plan of two rows, of which the trial of the second was given up."""
    constants: Any = dict.fromkeys(("L", "mu", "V", "exact"), 1.0)
    made = fb.PlanResult(
        1e-3, 2, 3, Prices(1.0, 3.0), constants, [FIRST, ROW], ["close"], True
    )
    asked: dict = {}
    plan = "fedblend.runs.plan.plan"
    monkeypatch.setattr(plan, lambda config, **given: asked.update(given) or made)
    return asked, made


def test_a_column_has_one_meaning(place, capsys, planned):
    """Costs of typical and of certified rounds stand apart, in the same unit."""
    asked, _ = planned
    assert main(["plan", write(FLIX), "--alpha", "0.5", "--up", "2"]) == 0
    assert asked["alpha"] == 0.5 and asked["up"] == 2 and asked["trials"]
    said = capsys.readouterr()
    assert said.err == "warning: close\n"
    lines = said.out.splitlines()
    first, second = (line for line in lines if line.startswith((" Scaff", " DGD")))
    bits = ["1", "kbit", "1", "kbit"]
    assert first.split()[4:] == ["90", "80", "5", "7", *bits, "1", "10"]
    assert second.split() == ["DGD", "90", "80", ">", "11", "-", "-", "-", "-", "4"]


def test_json_is_the_result_in_python(place, capsys, planned):
    _, made = planned
    assert main(["plan", write(FLIX), "--alpha", "0.5", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    commands = [row.pop("command") for row in said["rows"]]
    assert commands == ["fedblend run flix.toml --set run.rounds=6", None]
    assert said == made.plain()
    assert made.best == said["rows"][0]


PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def solvers(text: str) -> list[list[str]]:
    """Name and numbers of each row of a printed table, 1/p and its numbers left out."""
    table = re.search(r"─ *\n(.*?)\n\s*\n", text + "\n\n", re.DOTALL)
    assert table is not None
    return [
        re.sub(r",? 1/p = .*", "", line).split()[:4] for line in table[1].splitlines()
    ]


@pytest.mark.slow
def test_the_table_of_the_page_is_printed(place, capsys, compiled, monkeypatch):
    """The same solvers and numbers of theory, and the same first."""
    monkeypatch.setenv("COLUMNS", "120")
    page = PAGE.read_text()
    heading, _, rest = page.partition("## An example")[2].partition("```")
    (command,) = re.findall(r"`(fedblend plan .*?)`", heading)
    shown = rest.partition("```")[0]
    file = re.search(r'write_text\("""(.*?)"""', page, re.DOTALL)
    assert file is not None
    Path("flix.toml").write_text(file[1])
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    made, told = solvers(printed), solvers(shown)
    assert made[0] == told[0]
    assert sorted(made) == sorted(told)
    assert "median" in shown and "certified" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--alpha", "1.5"], "--alpha: 1.5 is not in [0, 1]"),
        (["--alpha", "nan"], "--alpha: nan is not in [0, 1]"),
        (["--eps", "0"], "--eps: 0.0 is not a number above 0"),
        (["--rounds", "-1"], "--rounds: -1 is not a whole number of at least 0 ("),
        (["--rounds", "3", "--alpha", "0.1"], "--alpha and --rounds: give only one"),
        (["--bits", "20Mbit"], "'20Mbit' is not a valid float"),
        (["--bits", "-3"], "--bits: -3.0 is not a number of at least 0"),
        (["--eps", "1e-14"], "eps: 1e-14 is below 1e-13: float64 does not resolve it"),
        (["--up", "1", "--down", "1"], "--up, --down: choose among solvers; give al"),
        (["--alpha", "0.1", "--up", "1"], "--down: is missing; give the prices"),
        (["--alpha", "0.1", "--up", "-1", "--down", "1"], "--up: -1.0 is not a number"),
        (["--alpha", "0.1", "--up", "0", "--down", "0"], "0 is not a pair of prices"),
        (["--set", "algorithm.alpha=2.0"], "algorithm.alpha: 2.0 is not in [0, 1]"),
    ],
)  # fmt: skip
def test_bad_command_lines(arguments, line, place, capsys):
    assert main(["plan", write(FLIX), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert line in said.err


ONE_CLASS = (
    "data.partition=classes_per_client", "data.classes=1", "model.l2=0.0",
)  # fmt: skip
REFUSED = {
    ("algorithm.batch_size=20",): 'batch_size: is 20; theory needs "all"',
    ("algorithm.mix=outputs",): "algorithm.mix: is",
    ("run.cohort=2",): "run.cohort: is 2; theory needs it left out",
    ("run.weights=by_count",): 'run.weights: is "by_count"; theory needs "uniform"',
    ("run.dropout=0.1",): "run.dropout: is 0.1",
    (
        "model.name=mlp",
    ): "constant L_i of every client, which is known for the models logistic",
    ("model.l2=0.0",): "model.l2: is 0, and f_i are not strongly convex",
    ONE_CLASS: "their own models x_i do not exist",
    ("data.source=digits",): "logistic: 10 outputs, it has a single score",
    ("compress.compressor={name='top_k', k=3}",): "no step for top_k(3), which is bia",
    ("compress.compressor={name='sign'}",): "no step for sign, which is biased",
}


@pytest.mark.parametrize("settings", REFUSED, ids=" ".join)
def test_what_theory_does_not_cover(settings, place, capsys):
    """Neither a plan nor the step of theory, but for what only plans need."""
    file = write(FLIX)
    sets = [word for setting in settings for word in ("--set", setting)]
    if settings[0] == "model.name=mlp":
        sets += ["--set", "algorithm.personal.solver=lbfgs"]
    assert main(["plan", file, *sets]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert REFUSED[settings] in said
    if not any(setting.startswith("model.l2") for setting in settings):
        assert main(["run", file, *sets]) == 2
        assert REFUSED[settings] in capsys.readouterr().err
    assert not Path("runs").exists()
