# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Commands of other distributions, with and without the distribution."""

import ast
import importlib
import tomllib
from pathlib import Path

import pytest
import typer

from fedblend import cli
from fedblend.cli.plugins import PLUGINS
from fedblend.data.datasets import DATASETS
from test_architecture import imports, without_types

ROOT = Path(__file__).parents[2]


class Found:
    """An entry point that adds a command."""

    name = "reproduce"

    def load(self):
        return lambda paper: typer.echo(f"measured {paper}")


@pytest.fixture(params=[True, False], ids=["installed", "missing"])
def installed(request, monkeypatch):
    """Whether the distribution is installed, and the command line for that case."""
    points = [Found()] if request.param else []
    monkeypatch.setattr(cli.plugins, "entry_points", lambda **_: points)
    app = typer.Typer()
    app.command("other")(lambda: None)
    cli.plugins.add_to(app)
    monkeypatch.setattr(cli, "app", app)
    return request.param


def test_the_command_runs_or_says_in_one_line_how_to_install_it(installed, capsys):
    code = cli.main(["reproduce", "flix"])
    shown = capsys.readouterr()
    if installed:
        assert (code, shown.out) == (0, "measured flix\n")
        return
    assert code == 2
    (line,) = shown.err.splitlines()
    assert "fedblend-reproductions is not installed" in line
    assert "pip install ./adapters ./reproductions" in line


def test_options_are_no_second_error_where_it_is_missing(installed, capsys):
    if installed:
        pytest.skip("the command has options of its own")
    assert cli.main(["reproduce", "flix", "F3", "--quick", "--out", "here"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not installed" in line


def test_help_works_in_both_cases(installed, capsys):
    assert cli.main(["reproduce", "--help"]) == 0
    assert "reproduce" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["federation", "reproductions"])
def test_every_entry_point_is_a_known_command(folder):
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    name = project["name"]
    known = {key for key, one in PLUGINS.items() if one.distribution == name}
    points = project["entry-points"][cli.plugins.GROUP]
    assert set(points) == known
    for point in points.values():
        module, _, attribute = point.partition(":")
        assert hasattr(importlib.import_module(module), attribute)


def test_the_datasets_of_papers_are_found_by_entry_point():
    project = tomllib.loads((ROOT / "reproductions" / "pyproject.toml").read_text())
    (module,) = project["project"]["entry-points"]["fedblend.datasets"].values()
    loader = DATASETS["movielens"].load
    assert loader.__module__.startswith(importlib.import_module(module).__name__)


def test_the_wheel_of_fedblend_has_no_other_distribution():
    """Neither does the package import one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    targets = project["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"] == {"packages": ["src/fedblend"]}
    others = {"/adapters", "/federation", "/interop", "/reproductions"}
    assert others <= set(targets["sdist"]["include"])
    sources = (ROOT / "src" / "fedblend").rglob("*.py")
    imported = {
        (path.name, name)
        for path in sources
        for name in imports(without_types(ast.parse(path.read_text())))
    }
    assert not [pair for pair in imported if pair[1].startswith("fedblend_")]
