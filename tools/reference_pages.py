# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Write the pages of docs/ that are made from the code; git ignores them.

python tools/reference_pages.py

docs/api.md and docs/api/ come from docstrings, docs/cli.md from the commands,
docs/algorithms.md from the registrations. ``make docs`` writes them, too.
"""

import shutil

import api_reference
import cli_reference
import registry_tables
from docs_links import DOCS, GENERATED


def pages() -> dict[str, str]:
    """The text of every such page, by its path inside of docs."""
    return {
        **api_reference.pages(),
        "cli.md": cli_reference.page(),
        "algorithms.md": registry_tables.page(),
    }


def write() -> None:
    """Write all pages, and remove those of modules that are gone."""
    shutil.rmtree(DOCS / "api", ignore_errors=True)
    for path, text in pages().items():
        assert GENERATED.fullmatch(path), path
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
