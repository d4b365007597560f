# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table of attacks in docs/security.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_attack_has_tests_that_exist():
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("## Attacks")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[4])
        assert named and set(named) <= there, row
    assert len(rows) >= 20
