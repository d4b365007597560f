# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every sentence of docs/security.md has a test that exists, or states a limit."""

import re
from pathlib import Path

import slow_tests

from fedblend.theory.privacy import row_epsilon

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAME = re.compile(r"`(test_\w+)`")
TESTED = re.compile(r"`(?:test_\w+(?:\.py)?|(?:benchmarks|\w+/studies)/\w+\.py)`")
LIMIT = re.compile(r"\bnot\b")
ATTACKERS = "## Who can do what"


def claims() -> list[str]:
    """Sentences and rows of tables below the table of parts.

    Where the head of a table names a test, or what measures it, its rows need none.
    """
    text = re.sub(r"^#.*$|^<!--.*-->$", "", PAGE[PAGE.index(ATTACKERS) :], flags=re.M)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=- |\d\. )", text):
        lines = block.strip().splitlines()
        if not lines or not lines[0].startswith("| "):
            line = re.sub(r"^(- |\d\. )", "", " ".join(map(str.strip, lines)))
            line = re.sub(r"\*\*[^*]+\.\*\* ", "", line)  # a title
            found += re.split(r"(?<=\.) ", line)
        elif not TESTED.search(lines[0]):
            found += lines[2:]
    return [one for one in found if one]


def test_every_claim_has_a_test_or_is_a_limit():
    found = claims()
    assert [
        one for one in found if not TESTED.search(one) and not LIMIT.search(one)
    ] == []
    assert len(found) > 100


def test_every_test_that_is_named_exists():
    there = {
        name
        for folder in slow_tests.SUITES
        for path in (ROOT / folder).rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(NAME.findall(PAGE))
    assert named <= there, named - there
    assert len(named) > 100


def test_every_attacker_has_what_is_stopped_and_what_is_not():
    part = PAGE.partition(ATTACKERS)[2].partition("\n## ")[0]
    sections = re.split(r"^### ", part, flags=re.M)[1:]
    assert len(sections) == 8
    for section in sections:
        rows, rest = re.findall(r"^\| .*$", section, re.M)[1:], section.split("|")[-1]
        assert rows and all(NAME.search(row) for row in rows), section
        assert LIMIT.search(rest), section


def test_epsilons_on_the_page():
    """Of answers from all rows, one step each."""
    table = PAGE.partition("(`test_epsilons_on_the_page`)")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.M)
    assert len(rows) == 5
    for noise, *shown in rows:
        for answers, epsilon in zip((1, 60), shown, strict=True):
            found = row_epsilon({(float(noise), 1.0): answers}, 1e-5)
            assert abs(found - float(epsilon)) < 0.06
