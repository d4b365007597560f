# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The website of the documentation: links, navigation, offline, search, equations."""

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import cli_reference
import docs_links
import docs_site
import pytest
import reference_pages

ROOT = Path(__file__).parents[1]


class Page(html.parser.HTMLParser):
    """What a page of the site links to, loads, and can be linked by."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given.get("id", ""), given.get("name", "")}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given or (tag == "link" and "href" in given):
            self.loads.append(given.get("src") or given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built once."""
    out = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "docs_site.py"), str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def built(site) -> dict[Path, Page]:
    return {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_every_link_of_readme_and_docs_leads_to_a_file_and_a_heading():
    assert [
        line for page in docs_links.pages() for line in docs_links.broken(page)
    ] == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path):
    (tmp_path / "other.md").write_text("# A heading, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[fine](other.md#a-heading-with-code) `[code](no.md)` [web](https://x.org/)\n"
        "```\n[code](none.md)\n```\n[a](gone.md) [b](other.md#gone) [c](#gone)\n"
    )
    assert [line.split(": ")[1] for line in docs_links.broken(page)] == [
        "gone.md",
        "other.md#gone",
        "#gone",
    ]


def test_the_navigation_names_pages_that_exist_each_once():
    there = {
        page.relative_to(ROOT / "docs").as_posix() for page in docs_links.pages()[3:]
    }
    names = list(docs_site.named(docs_site.navigation()))
    made = set(reference_pages.pages())
    assert sorted(names) == sorted(there | made | {"contributing.md", "changelog.md"})


def test_every_command_is_described_with_its_options():
    text = cli_reference.page()
    for name, command in list(cli_reference.commands())[1:]:
        assert f"## `{name}`" in text and command.help, name
        for one in command.params:
            if one.param_type_name == "option" and not one.hidden:
                assert one.help and f"`{one.opts[0]}" in text, f"{name} {one.opts[0]}"


RESULT = re.compile(r"^\|(.*)\| \[(\w+)\]\(results/(\w+)\.md#[^)]*\) \|$", re.M)
FINE_TUNED = {"FedAvg, localized", "FedAvg, fine-tuned"}


def test_the_table_that_helps_to_choose_has_the_measured_numbers():
    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    rows = RESULT.findall(text)
    assert len(rows) == 8
    for cells, claim, paper in rows:
        _, alone, fedavg, tuned, mixed, by = (one.strip() for one in cells.split("|"))
        named = {by, by.split(",")[0]}
        for shown, names in [
            (alone, {"alone"}),
            (fedavg, {"FedAvg"}),
            (tuned, FINE_TUNED),
            (mixed, named),
        ]:
            known = accuracies(paper, claim, names)
            nearest = min(abs(float(shown) - value) for value in known)
            assert nearest <= 0.0501, f"{claim}: {shown} is none of {known}"  # rounded


def accuracies(paper: str, claim: str, names: set[str]) -> list[float]:
    """What a claim measured for a method, in percent, in all of its settings."""
    path = ROOT / "docs" / "results" / paper / f"{claim}.json"
    head, *rows = json.loads(path.read_text(encoding="utf-8"))["table"]
    column = head.index("test accuracy")
    found = [float(row[column].split()[0]) for row in rows if names & {*row[:2]}]
    return [100 * value if value < 1 else value for value in found]


@pytest.mark.slow
def test_no_page_of_the_site_loads_anything_from_another_host(built):
    assert len(built) > 100
    loaded = {(path.name, one) for path, page in built.items() for one in page.loads}
    assert {one for _, one in loaded if urlsplit(one).netloc} == set()


@pytest.mark.slow
def test_links_and_anchors_of_the_site_hold(site, built):
    lost = set()
    for path, page in built.items():
        if path.name == "404.html":
            continue  # its links are from the root of a server
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith(("data:", "#__")):
                continue
            there = (
                (path.parent / unquote(parts.path)).resolve() if parts.path else path
            )
            there = there / "index.html" if there.is_dir() else there
            known = (
                built[there].anchors if there in built else {unquote(parts.fragment)}
            )
            if not there.exists() or (
                parts.fragment and unquote(parts.fragment) not in known
            ):
                lost.add(f"{path.relative_to(site)}: {link}")
    assert lost == set()


@pytest.mark.slow
def test_source_files_have_pages(site):
    shown = (site / "source/src/fedblend/algorithms/fedavg.py.html").read_text("utf-8")
    assert "def" in shown and "fedavg" in shown


@pytest.mark.slow
def test_an_equation_is_drawn_in_the_color_of_the_text(site):
    drawn = docs_site.equation(r"\min_x \; \frac{1}{n} \sum_{i=1}^n f_i(x) < \infty")
    assert 'fill="currentColor"' in drawn and "\n\n" not in drawn
    assert r"\frac{1}{n} \sum_{i=1}^n f_i(x) &lt; \infty" in drawn
    for page in ("glossary", "flix", "mixed"):
        text = (site / f"{page}.html").read_text("utf-8")
        assert 'class="equation"><svg' in text, page


@pytest.mark.slow
def test_search_and_dark_mode_work_from_a_file_without_a_network(site, browser):
    asked: list[str] = []
    errors: list[str] = []
    page = browser.new_page(color_scheme="dark")
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "index.html").as_uri())
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
    page.keyboard.press("/")
    page.keyboard.type("control variates", delay=20)
    page.get_by_text("scaffold").first.wait_for(timeout=20_000)
    page.close()
    assert errors == []
    assert [url for url in asked if urlsplit(url).scheme.startswith("http")] == []
