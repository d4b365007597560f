# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The HTML file: complete, closed, small, and safe against hostile names."""

import base64
import gzip
import hashlib
import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fedblend.report.page
from fedblend.errors import RunError
from fedblend.report.page import write_page
from fedblend.report.page.content import page_content
from fedblend.report.page.document import document
from synthetic_run import write_run

VENDOR = Path(fedblend.report.page.__file__).parent / "vendor"
LIMIT = 3_000_000
HOSTILE = "</script><img src=x onerror=alert(1)>%%script%%"


def content_of(file: Path) -> dict[str, Any]:
    """What the page unpacks."""
    packed = re.search(r'id="content">([^<]*)<', file.read_text())
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


class Elements(HTMLParser):
    """The elements of a page and their attributes, as a browser reads them."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_plotting_library_is_the_published_one():
    known = tomllib.loads((VENDOR / "versions.toml").read_text())["uPlot"]
    for name, digest in known["sha256"].items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
    assert f"(v{known['version']})" in (VENDOR / "uPlot.iife.min.js").read_text()
    assert "MIT" in (VENDOR / "uPlot.LICENSE").read_text()
    assert {path.name for path in VENDOR.iterdir()} == {
        "versions.toml",
        *known["sha256"],
    }


def test_ten_thousand_clients_fit_into_three_megabytes(large_page: Path):
    assert large_page.stat().st_size < LIMIT
    run = content_of(large_page)["runs"][0]
    assert len(run["clients"]["ids"]) == 10_000 and run["clients"]["left_out"] == []
    assert run["curves"]["round"][-1] == 500


def test_nothing_in_the_file_asks_for_anything(page_file: Path):
    elements = Elements(page_file.read_text()).found
    loading = [
        (tag, attributes)
        for tag, attributes in elements
        if {"src", "srcset", "data", "action"} & set(attributes)
        or tag in ("link", "base")
    ]
    assert loading == []
    policy = next(
        str(attributes["content"])
        for _, attributes in elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy and "connect" not in policy


def test_the_policy_allows_the_scripts_of_the_file_alone(page_file: Path):
    text = page_file.read_text()
    for tag in ("script", "style"):
        for body in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in text


def test_a_hostile_text_adds_no_element(tmp_path: Path):
    kept = write_run(tmp_path / "kept", name="kept")
    known = write_page([kept.path], tmp_path / "kept.html").read_text()
    hostile = write_run(tmp_path / "hostile", name=HOSTILE, names={3: HOSTILE})
    file = tmp_path / "hostile.html"
    file.write_text(document(page_content([hostile.path]) | {"verdict": [HOSTILE]}))
    tags = [tag for tag, _ in Elements(known).found]
    more = [tag for tag, _ in Elements(file.read_text()).found]
    lines = 1 - len(content_of(tmp_path / "kept.html")["verdict"])
    assert more.count("p") == tags.count("p") + lines
    assert [tag for tag in more if tag != "p"] == [tag for tag in tags if tag != "p"]
    assert "onerror=alert" in file.read_text()  # as text: in the title, in the verdict
    assert "<img" not in file.read_text()


def test_the_page_of_a_client_holds_no_other_client(run_folder: Path, tmp_path: Path):
    file = write_page([run_folder], tmp_path / "own.html", client="hospital-7")
    text = json.dumps(content_of(file)) + file.read_text()
    assert "hospital-7" in text
    assert "hospital-8" not in text and "onerror" not in text
    rows = [
        line.split(",")
        for line in (run_folder / "clients.csv").read_text().splitlines()
    ]
    names = rows[0]
    own = {cell for row in rows[1:] if row[2] == "hospital-7" for cell in row}
    held = set(re.findall(r"\d+", json.dumps(content_of(file)["runs"][0]["clients"])))
    for row in rows[1:]:
        for name, cell in zip(names, row, strict=True):
            # Losses and alphas are drawn: no other client has the same by chance.
            if ("loss" in name or name == "alpha") and cell not in own:
                assert str(round(round(float(cell), 4) * 10_000)) not in held


def test_the_page_of_a_client_holds_no_means_over_clients(run_folder: Path, tmp_path):
    """Of two clients, a mean and the own number tell the other's."""
    file = write_page([run_folder], tmp_path / "own.html", client="7")
    run = content_of(file)["runs"][0]
    assert not {"ends", "curves", "headline", "config", "costs", "central"} & set(run)
    assert "folder" not in run and "warnings" not in run
    numbers = {
        of: value
        for name, column in run["clients"]["columns"].items()
        for of, value in [(name, column["v"])]
    }
    assert all(len(values) == 1 for values in numbers.values())


def test_a_client_that_is_not_there_is_named(run_folder: Path, tmp_path: Path):
    with pytest.raises(RunError, match="has no client 'hospital-9'; did you mean"):
        write_page([run_folder], tmp_path / "own.html", client="hospital-9")
    with pytest.raises(RunError, match="about one run; give one folder"):
        write_page([run_folder] * 2, tmp_path / "own.html", client="7")


def test_the_same_folders_make_the_same_file(run_folder: Path, tmp_path: Path):
    one = write_page([run_folder], tmp_path / "a.html").read_bytes()
    assert one == write_page([run_folder], tmp_path / "b.html").read_bytes()


def test_a_number_that_json_has_not_is_one_line(tmp_path):
    folder = write_run(tmp_path / "run")
    text = folder.config.read_text()
    folder.config.write_text(re.sub(r"(?m)^name = .*", "name = nan", text, count=1))
    with pytest.raises(RunError, match="not finite"):
        write_page([tmp_path / "run"], tmp_path / "page.html")
