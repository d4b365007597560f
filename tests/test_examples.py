# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows does run: README, docs, docstrings, examples."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from test_architecture import MODULES as EVERY
from test_architecture import module_of

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("**/*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LATER = (
    "adapters.md",
    "alpha.md",
    "apfl.md",
    "audit_privacy.md",
    "communication.md",
    "compare.md",
    "conformance.md",
    "export.md",
    "flix.md",
    "new_clients.md",
    "personal.md",
    "plan.md",
    "robustness.md",
    "transformer.md",
    "flax_model.py",
    "own_csv.py",
    "quickstart.py",
    "sklearn_crossval.py",
    "sweep.py",
)
"""What takes long and shows nothing that other tests do not run: for the slow ones."""
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


MODULES = [module_of(path) for path in EVERY if ">>> " in path.read_text()]


@pytest.fixture
def user_settings():
    """Examples are written for users, whose shapes may broadcast."""
    before = jax.config.jax_numpy_rank_promotion  # pyright: ignore
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", before)


def blocks(page: Path) -> list[str]:
    return FENCE.findall(page.read_text()) if page.exists() else []


def later(paths: list[Path]) -> list:
    return [
        pytest.param(
            path, id=path.name, marks=pytest.mark.slow if path.name in LATER else ()
        )
        for path in paths
    ]


@pytest.mark.parametrize("page", later([page for page in PAGES if blocks(page)]))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, user_settings):
    """All blocks of a page in one namespace, in order, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBLEND_TINY", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_the_readme_shows_code():
    written = README.exists() and len(README.read_text().splitlines()) > 20
    assert blocks(README) or not written


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name, user_settings):
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.failed == 0
    assert found.attempted > 0


@pytest.mark.parametrize("path", later(EXAMPLES))
def test_an_example_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**os.environ, "FEDBLEND_TINY": "1", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example ends with a number"
