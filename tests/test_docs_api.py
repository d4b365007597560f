# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The API reference has every public name."""

from api_reference import pages, public, undocumented


def test_every_public_name_has_a_docstring():
    found = [name for entry in public() for name in undocumented(entry)]
    assert found == [], "every public name needs a docstring"


def test_every_public_name_is_in_the_index():
    index = pages()["api.md"]
    missing = [entry.name for entry in public() if f"- `{entry.name}`:" not in index]
    assert missing == []
