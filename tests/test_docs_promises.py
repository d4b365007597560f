# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What README.md and the docs promise is what the code does."""

import inspect
import re
import tomllib
from pathlib import Path

from fedblend.registry import ALGORITHMS
from fedblend.runs.auto import network
from fedblend.runs.auto.candidates import CANDIDATES

ROOT = Path(__file__).parents[1]
ONE_MODEL = "compressed_scaffnew fedavg fedopt fedprox locodl scaffnew scaffold svrg"
"""Algorithms, outside of contrib, with which all clients deploy the same model."""
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def plain(name: str) -> str:
    return re.sub(r"[^a-z0-9(),]", "", name.lower().replace("(lora)", ""))


def conformance_rows() -> str:
    """The first two cells of rows, which name an algorithm or an equation; headings."""
    lines = text("docs/conformance.md").splitlines()
    return plain(" ".join(line[:200] for line in lines if line[:2] in ("| ", "##")))


def test_every_personal_method_that_is_counted_has_a_row_of_conformance():
    counted = text("docs/libraries.md").partition("The 23 of fedblend: ")[2]
    methods = plain(counted.partition(".\n")[0]).split(",")
    assert len(methods) == 23
    assert re.search(r"\| personal methods [^|]*\| 23 \|", text("README.md"))
    assert [name for name in methods if name not in conformance_rows()] == []


def test_every_personal_method_that_is_registered_has_a_row_of_conformance():
    page = plain(text("docs/conformance.md"))
    homes = {name: entry.build.__module__ for name, entry in ALGORITHMS.items()}
    confirmed = [
        name
        for name, home in homes.items()
        if home.startswith("fedblend.algorithms.") and name not in ONE_MODEL.split()
    ]
    assert len(confirmed) > 20
    assert [name for name in confirmed if plain(name) not in page] == []


def test_every_equation_of_apfl_has_a_row_of_conformance():
    module = inspect.getmodule(ALGORITHMS["apfl"].builder)
    equations = set(re.findall(r"\(\d+\)", (module and module.__doc__) or ""))
    assert equations >= {"(6)", "(7)", "(8)", "(9)", "(10)"}
    assert [one for one in sorted(equations) if one not in conformance_rows()] == []


def test_the_tests_that_are_named_exist():
    missing = [
        f"{page.name}: {file}::{name}"
        for page in (ROOT / "docs").glob("*.md")
        for file, name in TEST.findall(page.read_text(encoding="utf-8"))
        if f"def {name}(" not in text(file)
    ]
    assert missing == []


def verdicts(page: str) -> list[list[int]]:
    """The numbers beside each page of results, without those at a paper's sizes."""
    rows = re.findall(r"^\| \[[^]]+\]\((?:docs/)?results/.*", text(page), re.M)
    numbers = [
        re.findall(r"(?<=\| )\d+(?= \|)", row) for row in rows if "sizes" not in row
    ]
    return [[int(one) for one in row] for row in numbers if row]


def test_the_claims_and_their_verdicts():
    """The table of README.md is that of the evidence, which counts its own rows."""
    shown, kept = verdicts("README.md"), verdicts("docs/evidence.md")
    assert shown == [counts[1:] for counts in kept]
    total = [sum(column) for column in zip(*shown, strict=True)]
    assert f"| all | {total[0]} | {total[1]} | {total[2]} |" in text("README.md")
    assert f"{sum(total)} claims, each with a criterion" in text("README.md")
    pages = text("docs/evidence.md")
    words = ("reproduced", "partly", "not reproduced")
    at_sizes = [2, 1, 0]
    assert [pages.count(f"[{word}](results/") for word in words] == [
        one + more for one, more in zip(total, at_sizes, strict=True)
    ]


def test_the_versions_of_python():
    files = [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]
    asked = {
        tomllib.loads(file.read_text())["project"]["requires-python"] for file in files
    }
    assert asked == {">=3.11"}
    assert "Python 3.11 or newer" in text("README.md")


def test_what_every_method_sends_and_who_accepts_it():
    table = text("docs/what_leaves.md").partition("## By method")[2].partition("## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| [^|]* \| (accepts|refuses)", table, re.M)
    said = {
        name: word for names, word in rows for name in re.findall(r"`(\w+)`", names)
    }
    known = {
        name: "accepts"
        if {*entry.sends} <= {"update"} and entry.reads == "gradients"
        else "refuses"
        for name, entry in ALGORITHMS.items()
    }
    assert {name: said.get(name) for name in known} == known


def test_the_largest_table_for_networks():
    assert f"more than {network.MOST_ROWS:,} rows" in text("docs/limits.md")


def test_every_candidate_of_auto_has_a_row():
    page = text("docs/auto.md")
    assert [one for one in CANDIDATES if f"\n| {one.title} |" not in page] == []


def test_no_page_loads_anything_from_another_host():
    """The site works without a network; a slow test looks at its built pages."""
    loads = re.compile(r"(?:src=[\"']?|!\[[^]]*\]\(|url\()(?:https?:)?//")
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.css")]
    assert len(pages) > 40
    assert [page.name for page in pages if loads.search(page.read_text("utf-8"))] == []
    theme = tomllib.loads(text("zensical.toml"))["project"]["theme"]
    assert theme["font"] is False
