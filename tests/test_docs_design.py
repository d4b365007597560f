# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""docs/design.md shows the tree and the import levels as they are."""

import re
from pathlib import Path

from test_architecture import LEVELS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedblend"
TEXT = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def block(heading: str) -> list[str]:
    """The lines of the first fenced block under a heading."""
    (found,) = re.findall(
        rf"^## {heading}\n.*?^```\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE
    )
    return found.splitlines()


def test_the_tree_is_the_package():
    inside = [line for line in block("The tree") if line.startswith("  ")]
    shown = set(re.findall(r"\b\w+(?:/|\.pyi?)(?=\s|$)", "\n".join(inside)))
    there = {f"{path.name}" for path in PACKAGE.glob("*.py*") if path.suffix != ".pyc"}
    there |= {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    there -= {"__init__.py", "py.typed"}
    assert there <= shown
    files = [f"{name}__init__.py" if name.endswith("/") else name for name in shown]
    missing = [name for name in files if not list(PACKAGE.rglob(name))]
    assert missing == []


def test_the_levels_are_those_that_are_checked():
    shown = [
        set(re.findall(r"\w+", re.sub(r"\(.*\)", "", line.partition("  ")[2])))
        for line in block("Import levels")
    ]
    assert shown == list(LEVELS)
