# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of results: a short table whose verdicts link to the sections below it."""

import json
import re
from pathlib import Path

import pytest

from fedblend_reproductions import apfl, flix, mixed
from fedblend_reproductions.claims import Claim, Finding, Verdict, reproduce
from fedblend_reproductions.page import Part, anchor, page

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CLAIMS = {
    "flix": flix.CLAIMS,
    "apfl": apfl.CLAIMS,
    "mixed": mixed.CLAIMS,
    "mixed_paper_sized": mixed.PAPER_SIZED,
}
PAGES = {
    "flix": [("flix", "")],
    "apfl": [("apfl", "")],
    "mixed": [("mixed", ""), ("mixed_paper_sized", "paper-sized")],
}
"""Folders of the claims of a page, and their sizes."""
STORED = [
    pytest.param(claim, RESULTS / paper / f"{claim.name}.json", id=f"{paper}-{name}")
    for paper, claims in CLAIMS.items()
    for claim in claims
    for name in [claim.name]
]
LONGEST = 90
"""Characters of a headline, so that a row of the table stays readable."""


def claim(**finding):
    found = Finding(Verdict.partly, "2 | 3", {"one": 1}, {})._replace(**finding)
    return Claim(
        "X1",
        "First: one, two",
        "it rises",
        lambda quick: found,
        lambda numbers: f"It is {numbers['one']}",
        "2",
        undecided="rows are missing",
    )


def shown(one, folder, **options):
    found = reproduce([one], folder, **options)
    return page("A paper", "the command", Part([one], found, "figures"))


def test_a_row_links_to_its_section(tmp_path):
    text = shown(claim(), tmp_path, quick=True)
    assert "| X1 First: one, two | It is 1 | 2 | [partly](#x1-first-one-two) |" in text
    assert "\n## X1 First: one, two\n" in text
    assert "**Partly reproduced.** It is 1. The paper: 2." in text
    assert "--quick" in text


def test_the_long_text_is_in_the_section(tmp_path):
    before = {"verdict": "reproduced", "criterion": "it rose", "ours": "4"}
    table = [["a", "b"], ["c", "d | e"]]
    changed = {"criterion": "Criterion: rising.", "why": "one seed", "table": table}
    text = shown(claim(before=before, **changed), tmp_path)
    assert "**Ours.** 2 | 3" in text
    assert "**Criterion.** Rising." in text
    assert "**Setting.** One seed" in text
    assert "**By an earlier criterion or setting: reproduced.**" in text
    assert "| c | d \\| e |" in text
    assert "**It cannot be decided here:** rows are missing." in text


def test_a_setting_that_begins_with_the_criterion_says_so(tmp_path):
    text = shown(claim(why="Criterion, fixed before the run: rising or so."), tmp_path)
    assert "**Criterion and setting, fixed before the run.** Rising or so." in text


def test_what_is_reproduced_is_not_undecided(tmp_path):
    text = shown(claim(verdict=Verdict.reproduced), tmp_path)
    assert "rows are missing" not in text


@pytest.mark.parametrize(("one", "path"), STORED)
def test_a_headline_is_short_and_has_a_number(one, path):
    headline = one.headline(json.loads(path.read_text())["numbers"])
    assert len(headline) <= LONGEST, headline
    assert re.search(r"\d", headline)
    assert not headline.endswith(".") and "nan" not in headline


def test_long_texts_are_lists_and_numbers_of_the_table_stand_once(tmp_path):
    head = ["", "training loss", "test accuracy"]
    table = [head, *([str(n), "0.5", f"9{n}.1 ± 0.2"] for n in range(3))]
    ours = "Accuracies are 90.1, 91.1, 92.1. One leads by 3.5."
    text = shown(claim(ours=ours, table=table), tmp_path)
    assert "| 1 | 91.1 ± 0.2 |" in text and "training loss" not in text
    assert "Accuracies are" not in text and "**Ours.** One leads by 3.5." in text


def test_accuracies_have_a_column_for_each_setting(tmp_path):
    head = ["", "", "rate", "training loss", "test accuracy", "best round"]
    rows = [("IID", "A"), ("IID", "B"), ("2 classes", "A")]
    table = [head, *([*row, "0.1", "1", f"9{n}", "2"] for n, row in enumerate(rows))]
    text = shown(claim(table=table), tmp_path)
    assert "| test accuracy (rate) | IID | 2 classes |" in text
    assert "| A | 90 (0.1) | 92 (0.1) |" in text and "| B | 91 (0.1) |  |" in text


def test_a_setting_of_several_claims_is_told_once(tmp_path):
    both = [claim(why="Five seeds. Only one."), claim(why="Five seeds. Other.")]
    ones = [one._replace(name=f"X{n}") for n, one in enumerate(both)]
    text = page("A", "b", Part(ones, reproduce(ones, tmp_path), "f", "small"))
    assert text.count("Five seeds.") == 1
    assert "- Five seeds. (X0 small, X1 small)" in text


@pytest.mark.parametrize("paper", PAGES)
def test_pages_are_those_of_the_stored_results(paper):
    """And every link within them has its heading, and no paragraph is long."""
    text = (RESULTS / f"{paper}.md").read_text()
    headings = {anchor(one) for one in re.findall(r"^#+ (.*)$", text, re.M)}
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert set(links) <= headings
    assert all(len(at.split()) <= 120 for at in text.splitlines() if at[:1] != "|")
    title, command = re.findall(r"^# (.*)\n\nMade by `(.*)`", text)[0]
    parts = []
    for folder, sizes in PAGES[paper]:
        paths = [RESULTS / folder / f"{one.name}.json" for one in CLAIMS[folder]]
        entries = [json.loads(path.read_text()) for path in paths]
        parts.append(Part(CLAIMS[folder], entries, folder, sizes))
    assert page(title, command, *parts) == text


def test_the_page_of_all_claims_has_every_claim_with_its_verdict():
    text = (RESULTS.parent / "evidence.md").read_text()
    found = 0
    for paper in [*PAGES, "adapters"]:
        rows = (RESULTS / f"{paper}.md").read_text().partition("\n## ")[0]
        for row in re.findall(r"^\| [A-Z]\d.*$", rows, re.M):
            assert row.replace("](#", f"](results/{paper}.md#") in text
            found += 1
    assert found == sum(map(len, CLAIMS.values())) + 2
