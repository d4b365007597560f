# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The API reference has every public name, and is as the docstrings are now."""

from pathlib import Path

from api_reference import pages, public, undocumented

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "run python tools/api_reference.py, and commit docs/api.md and docs/api"


def test_every_public_name_has_a_docstring():
    found = [name for entry in public() for name in undocumented(entry)]
    assert found == [], "every public name needs a docstring"


def test_the_reference_is_up_to_date():
    written = {
        path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8")
        for path in [DOCS / "api.md", *(DOCS / "api").glob("*.md")]
        if path.exists()
    }
    generated = pages()
    old = {
        name
        for name in {*written, *generated}
        if written.get(name) != generated.get(name)
    }
    assert not old, f"out of date: {sorted(old)}; {COMMAND}"


def test_every_public_name_is_in_the_index():
    index = pages()["api.md"]
    missing = [entry.name for entry in public() if f"- `{entry.name}`:" not in index]
    assert missing == []
