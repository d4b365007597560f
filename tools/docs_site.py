# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Build the documentation as a website that needs no network, into site/.

python tools/docs_site.py [FOLDER]

The pages are written to be read in the repository too. So a copy is prepared for
Zensical: links to source files lead to pages that show them, equations (``math``
blocks) become drawings, set by matplotlib, and pages that the navigation does not name
are appended to it. A broken link or anchor ends the build with code 1.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference_pages
from docs_links import DOCS, ELSEWHERE, LINK, ROOT, broken, pages, without_code

SETTINGS = ROOT / "zensical.toml"
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages beside docs/, and where links to them lead in the site."""
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".md": "markdown"}
MATH = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAV = re.compile(r"^nav = \[.*?^\]$", re.DOTALL | re.MULTILINE)
PATH_COMMANDS = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}
"""The letters of SVG for the codes of matplotlib's paths."""
SHIM = ("https://unpkg.com/iframe-worker/shim", "assets/vendor/iframe-worker.js")
"""The script of another host that Zensical's offline search asks for, and our copy."""


def equation(tex: str) -> str:
    """An equation as a drawing in the color of the text; its TeX is the description."""
    from matplotlib.textpath import TextPath

    drawn, bottom, width = [], 0.0, 0.0
    for line in tex.strip().splitlines():
        path = TextPath((0, 0), f"${line.strip()}$", size=17)
        box = path.get_extents()
        base = bottom + box.y1
        for points, code in path.iter_segments(simplify=False):
            letter = PATH_COMMANDS[int(code)]
            pairs = [] if letter == "Z" else points.reshape(-1, 2)
            numbers = [f"{x:.2f} {base - y:.2f}" for x, y in pairs]
            drawn.append(letter + " ".join(numbers))
        bottom = base - box.y0 + 10
        width = max(width, box.x1)
    label = html.escape(" ".join(tex.split()), quote=True)
    return (
        f'<p class="equation"><svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'width="{width:.0f}" height="{bottom:.0f}" aria-label="{label}" '
        f'viewBox="-2 -2 {width + 4:.0f} {bottom:.0f}">'
        f'<path fill="currentColor" d="{"".join(drawn)}"/></svg></p>'
    )


def prepare(folder: Path) -> None:
    """Put the pages into a folder as Zensical is to read them."""
    shutil.copytree(DOCS, folder)
    shown: set[Path] = set()
    generated = [DOCS / name for name in reference_pages.pages()]
    for page in [*pages(), *generated]:
        if page.name == "README.md" and page.parent == ROOT:
            continue
        inside = DOCS in page.parents
        name = page.relative_to(DOCS).as_posix() if inside else BESIDE[page.name]
        text = relinked(page, name, shown)
        text = MATH.sub(lambda found: equation(found.group(1)), text)
        (folder / name).write_text(text, encoding="utf-8")
    for path in shown:
        there = folder / source_page(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        code = path.read_text(encoding="utf-8")
        language = LANGUAGES.get(path.suffix, "text")
        title = path.relative_to(ROOT).as_posix()
        text = f"# {title}\n\n````{language}\n{code}\n````\n"
        there.write_text(text, encoding="utf-8")


def source_page(path: Path) -> str:
    """The name of the page that shows a file of the repository."""
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def relinked(page: Path, name: str, shown: set[Path]) -> str:
    """The text of a page with links that hold in the site, where it is ``name``.

    ``shown`` gets the source files that need a page.
    """
    text = page.read_text(encoding="utf-8")
    code = without_code(text)

    def target(found: re.Match) -> str:
        written, hash_mark, anchor = found.group(1).partition("#")
        if ELSEWHERE.match(written) or not written or not code[found.start()].strip():
            return found.group(1)
        file = (page.parent / written).resolve()
        if DOCS in file.parents:
            there = file.relative_to(DOCS).as_posix()
        elif file.parent == ROOT and file.name in BESIDE:
            there = BESIDE[file.name]
            anchor = "" if there == "index.md" else anchor
        else:
            shown.add(file)
            there, anchor = source_page(file), ""
        relative = os.path.relpath(there, Path(name).parent).replace(os.sep, "/")
        return f"{relative}{hash_mark}{anchor}" if anchor else relative

    return LINK.sub(target, text)


def named(nav: Any) -> Iterator[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from named(one)


def navigation() -> list[Any]:
    """The navigation of zensical.toml, and the pages that it does not name."""
    nav = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["project"]["nav"]
    known = {*named(nav)}
    written = [page for page in pages() if DOCS in page.parents]
    names = [page.relative_to(DOCS).as_posix() for page in written]
    names += sorted(reference_pages.pages())
    others = [name for name in names if name not in known]
    modules = [name for name in others if name.startswith("api/")]
    rest = [name for name in others if name not in modules]
    ((title, last),) = nav[-1].items()
    whole = [*nav[:-1], {title: [*last, {"Python, by module": modules}]}]
    return [*whole, {"Further pages": rest}] if rest else whole


def settings() -> str:
    """zensical.toml with the whole navigation, for the prepared pages."""
    text = SETTINGS.read_text(encoding="utf-8")
    return NAV.sub(lambda _: f"nav = {_toml(navigation())}", text)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        ((name, inside),) = value.items()
        return f'{{"{name}" = {_toml(inside)}}}'
    return "[" + ", ".join(map(_toml, value)) + "]"


def _without_hosts(site: Path) -> None:
    """Let no page ask another host for a script."""
    asked, ours = SHIM
    for page in site.rglob("*.html"):
        here = os.path.relpath(site / ours, page.parent).replace(os.sep, "/")
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(asked, here), encoding="utf-8")


def build(out: Path) -> int:
    """Build the site into a folder; returns the exit code."""
    reference_pages.write()
    found = [line for page in pages() for line in broken(page)]
    print(*found, sep="\n", end="\n" if found else "")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work / "docs")
        (work / "zensical.toml").write_text(settings(), encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=work, check=False)
        if done.returncode == 0:
            _without_hosts(work / "site")
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(work / "site", out)
    return done.returncode or int(bool(found))


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"))
