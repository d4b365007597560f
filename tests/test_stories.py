# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The stories: pages, scripts, figures and numbers belong together."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedblend as fb
from fedblend.data.dataset import MissingDataError

ROOT = Path(__file__).parents[1]
STORIES = ROOT / "docs" / "stories"
NEEDS = {
    "hospitals": (),
    "handwriting": ("femnist",),
    "keyboards": ("stackexchange_text", "wikitext-2"),
}
"""The datasets of each story."""
FOR_TESTS = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
"""What tests set to compile faster; users' programs add in another order."""
TIMED = {"hospitals"}
"""Stories whose numbers depend on the time that they had."""
CODE = re.compile(r"^```py\n(.*?)^```", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"!\[[^]]+\]\(([\w.]+\.png)\)")
MOST_BYTES = 200_000


def text(name: str) -> str:
    return (STORIES / f"{name}.md").read_text(encoding="utf-8")


def run(name: str, out: Path, **environment: str) -> str:
    """Run the script of a story; returns what it prints."""
    for needed in NEEDS[name]:
        try:
            fb.datasets.load(needed)
        except MissingDataError:
            pytest.skip(f"{needed} is not downloaded")
    of_users = {k: value for k, value in os.environ.items() if k not in FOR_TESTS}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "stories" / f"{name}.py"), str(out)],
        env={**of_users, "MPLBACKEND": "agg", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NEEDS)
def test_the_code_on_the_page_is_the_code_of_the_script(name):
    script = (ROOT / "examples" / "stories" / f"{name}.py").read_text("utf-8")
    shown = CODE.findall(text(name))
    assert shown
    assert [block for block in shown if block not in script] == []


@pytest.mark.parametrize("name", NEEDS)
def test_every_figure_is_there_and_small(name):
    figures = FIGURE.findall(text(name))
    assert figures
    assert [one for one in figures if (STORIES / one).stat().st_size > MOST_BYTES] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_the_script_of_a_story_runs_and_draws_its_figures(name, tmp_path):
    assert run(name, tmp_path, FEDBLEND_TINY="1").strip()
    drawn = [one for one in FIGURE.findall(text(name)) if "_report" not in one]
    assert [one for one in drawn if not (tmp_path / one).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NEEDS if name not in TIMED])
def test_the_numbers_on_the_page_are_those_of_the_script(name, tmp_path):
    """On the kind of device and the versions that made them, to the last digit."""
    printed = run(name, tmp_path).strip().splitlines()
    assert [line for line in printed if line not in text(name)] == []
