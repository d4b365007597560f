# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation uses the field's words, and names files that exist."""

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

from test_docs_glossary import exists

ROOT = Path(__file__).parents[1]
GENERATED = {"api.md", "algorithms.md"}
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in GENERATED),
]
PRIVATE = (
    "letters?|heard|nudges?|hello|lanes?|tall(y|ies)|doors?|books|newcomers?"
    "|lonely|told|yardstick"
)
"""Words of earlier versions; docs/glossary.md has those in use."""
BRITISH = (
    r"optimis\w+|personalis\w+|regularis\w+|initialis\w+|generalis\w+|minimis\w+"
    r"|neighbour\w*|behaviou?r(?<!or)|colour\w*|towards|enrolment|analys\w+(?<!is)"
    r"|favour\w*|licence|centre"
)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PLACES = "adapters|federation|interop|tests|benchmarks|examples|tools|src|reproductions"
FILE = re.compile(rf"(?<![\w/])(?:{PLACES})/[\w./*]+")


NAME = re.compile(r"\bfb\.\w+(?:\.\w+)*")
MODULE = re.compile(r"\bfedblend(?:\.[a-z_]\w*)+")


def prose(page: Path) -> str:
    """The text of a page without its blocks of code, and without code in a line."""
    return re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def found(pattern: str) -> list[str]:
    words = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    return [
        f"{page.name}: {match.group()}"
        for page in PAGES
        for match in words.finditer(prose(page))
    ]


def test_no_marks_of_a_merge():
    marks = ("<" * 7, ">" * 7)
    lines = [line for page in PAGES for line in page.read_text("utf-8").splitlines()]
    assert not [line for line in lines if line.startswith(marks)]


def test_no_word_of_earlier_versions():
    assert found(PRIVATE) == []


def test_american_spelling():
    assert found(BRITISH) == []


def test_names_of_the_package_that_are_used_exist():
    missing = {
        f"{page.name}: {name}"
        for page in PAGES
        for name in NAME.findall(page.read_text(encoding="utf-8"))
        if not exists(name)
    }
    assert missing == set()


def test_modules_that_are_named_exist():
    missing = {
        f"{page.name}: {name}"
        for page in PAGES
        for name in MODULE.findall(page.read_text(encoding="utf-8"))
        if not importable(name)
    }
    assert missing == set()


def importable(name: str) -> bool:
    """Whether this is a module, or a name in one."""
    if find_spec(name.rpartition(".")[0]) is None:
        return False
    value = importlib.import_module(name.rpartition(".")[0])
    return hasattr(value, name.rpartition(".")[2]) or find_spec(name) is not None


def test_files_that_are_named_exist():
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in FILE.findall(page.read_text(encoding="utf-8"))
        if not list(ROOT.glob(name.rstrip("./")))
    ]
    assert missing == []
