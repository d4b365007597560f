# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation uses the field's words, and names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = {"api.md"}
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in GENERATED),
]
PRIVATE = (
    "letters?|heard|nudges?|slopes?|hello|lanes?|tall(y|ies)|doors?|books|newcomers?"
    "|lonely|told|carriers?|yardstick|ledgers?"
)
"""Words of earlier versions; docs/glossary.md has those in use."""
BRITISH = (
    r"optimis\w+|personalis\w+|regularis\w+|initialis\w+|generalis\w+|minimis\w+"
    r"|neighbour\w*|behaviou?r(?<!or)|colour\w*|towards|enrolment|analys\w+(?<!is)"
    r"|favour\w*|licence|centre"
)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"\b(?:tests|benchmarks|examples|tools|src|reproductions)/[\w./*]+")


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


def test_no_word_of_earlier_versions():
    assert found(PRIVATE) == []


def test_american_spelling():
    assert found(BRITISH) == []


def test_files_that_are_named_exist():
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in FILE.findall(page.read_text(encoding="utf-8"))
        if not list(ROOT.glob(name.rstrip("./")))
    ]
    assert missing == []
