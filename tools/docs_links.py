# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Check the links of README and docs: to pages, to their headings, to source files.

python tools/docs_links.py
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1[ ]*$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: #+)?$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z]+:")
"""The beginning of an address that is not a file here."""
GENERATED = re.compile(r"api\.md|api/\w+\.md|cli\.md|algorithms\.md")
"""Pages of docs/ that are made from the code, see ``reference_pages``."""


class Link(NamedTuple):
    """A relative link as it is written, the file it leads to, and the anchor or ""."""

    written: str
    file: Path
    anchor: str


def pages() -> list[Path]:
    """All pages that users read, without those that are made from the code."""
    written = [page for page in sorted(DOCS.rglob("*.md")) if not is_generated(page)]
    return [*(ROOT / name for name in BESIDE), *written]


def is_generated(page: Path) -> bool:
    """Whether a page is made from the code."""
    inside = DOCS in page.parents
    return inside and bool(GENERATED.fullmatch(page.relative_to(DOCS).as_posix()))


def without_code(text: str) -> str:
    """The text with code blanked out, so that every character keeps its place."""
    for code in (FENCE, SPAN):
        text = code.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
    return text


def links(page: Path) -> Iterator[Link]:
    """The relative links of a page."""
    for written in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if not ELSEWHERE.match(written):
            name, _, anchor = written.partition("#")
            file = (page.parent / name).resolve() if name else page
            yield Link(written, file, anchor)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and the website name them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere, each with the reason."""
    found = []
    for written, file, anchor in links(page):
        if is_generated(file):
            continue  # the build of the website checks these
        if not file.exists():
            found.append(f"{page.name}: {written}: there is no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            found.append(f"{page.name}: {written}: there is no such heading")
    return found


if __name__ == "__main__":
    lines = [line for page in pages() for line in broken(page)]
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
