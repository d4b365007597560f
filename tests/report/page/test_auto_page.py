# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of ``fedblend auto``, from a folder whose numbers are made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedblend.errors import RunError
from fedblend.report.page import write_page
from fedblend.report.page.auto_page import tone
from fedblend.report.page.content import client_content, page_content
from fedblend.runs.run_folder import write_table

TITLES = {"local_only": "local only", "shared": "shared slopes", "net": "a network"}
CLIENTS = {"north": (0.30, 0.25, "gains"), "south": (0.399, 0.388, "unclear")}


def write_auto(folder: Path, deploy: str | None = "shared", **found: Any) -> Path:
    """A folder of three methods; the network has the lowest score."""
    tests = {"local_only": 0.35, "shared": 0.32, "net": 0.31}
    gains = {"mean_gain": 0.03, "low": 0.01, "high": 0.05, "better": 2, "worse": 0}
    methods: dict[str, Any] = {
        name: {"title": TITLES[name], "test": test, "setting": {"l2": 0.1}}
        | {"metrics": {"log_loss": test, "accuracy": 0.8}, "splits": 5}
        | ({} if name == "local_only" else {"gain_over_alone": gains})
        for name, test in tests.items()
    }
    choice = {"method": deploy or "local_only", "alone": "local_only"}
    state = {
        "verdict": ["Deploy shared slopes: 0.32 < 0.35.", "Both gain.", "How sure."],
        "warnings": ["'age' tells the target."],
        "request": {"table": "/data/ill.csv", "client": "site", "target": "ill"},
        "seen": {"rows": 90, "clients": 2, "inputs": 3, "columns": []},
        "criterion": "log loss",
        "outcome": "yes",
        "effect": "odds ratio",
        "worth": {"times": 2.0, "low": 1.5, "high": 3.0, "said": "2.0 times the rows"},
        "deploy": deploy,
        "methods": methods,
        "findings": {
            "choice": choice | {"candidate": "shared", "alike": ["shared", "net"]},
            "better": "shared",
            "answer": "together",
            "mean_gain": [0.03, 0.01, 0.05],
            "p": 0.01,
            "constant": 0.6,
            "who": {"gain": ["north"], "harmed": [], "measured": 2},
            **found,
        },
    }
    folder.mkdir()
    (folder / "auto.json").write_text(json.dumps(state))
    lines = [
        {"client": name, "rows": 40, "target": 0.5, "missing": 0.1}
        | {"missing_most": "", "alone": alone, "method": method, "verdict": word}
        | {"gain": alone - method, "low": -0.01, "high": 0.04}
        | {"expected": 0.25, "observed_low": 0.4, "observed_high": 0.6}
        for name, (alone, method, word) in CLIENTS.items()
    ]
    write_table(folder / "clients.csv", lines)
    why = {"rows": 40, "loss": 0.5, "columns": 0, "level": 0.1, "slopes": 0.0}
    told = {"clear": "level", "why": "its level"}
    write_table(folder / "why.csv", [{"client": one, **why, **told} for one in CLIENTS])
    effect = {"effect": 2.0, "low": 1.5, "high": 2.5}
    rows = [("", "age, per 9"), ("north", "level"), ("south", "level")]
    write_table(
        folder / "effects.csv",
        [{"client": client, "input": name, **effect} for client, name in rows],
    )
    return folder


def sections(content: dict) -> dict[str, Any]:
    return {one["id"]: one["blocks"] for one in content["sections"]}


@pytest.mark.parametrize("deploy", ["shared", "local_only"])
def test_the_first_row_is_the_method_of_the_verdict(tmp_path: Path, deploy):
    """Although the network's score is lower; every method has a row."""
    content = page_content([write_auto(tmp_path / "one", deploy)])
    table = sections(content)["methods"][0]
    names = [row[0] for row in table["rows"]]
    assert names[0] == TITLES[deploy]
    assert sorted(names[:-1]) == sorted(TITLES.values())
    assert table["rows"][-1][:3] == ["constant", "reference", "0.6000"]
    assert table["rows"][0][1] == "the verdict"
    assert content["tiles"][0]["value"] == table["rows"][0][2]


def test_title_and_warnings(tmp_path: Path):
    """The table and the target name the page; a warning is there once, at the top."""
    content = page_content([write_auto(tmp_path / "one")])
    assert content["title"] == "ill in ill.csv, by site"
    assert content["about"].startswith("90 rows of 2 clients · 5 splits · ")
    assert content["sections"][0]["id"] == "warnings"
    assert json.dumps(content).count("tells the target") == 1
    assert content["verdict"][0] == "Deploy shared slopes: 0.32 < 0.35."


def test_observed_over_expected(tmp_path: Path):
    found = sections(page_content([write_auto(tmp_path / "one")]))
    row = found["calibration"][0]["rows"][0]
    assert row[1:5] == ["more than expected", "50.0 %", "25.0 %", "2.00 (1.60 to 2.40)"]


def test_effects_shared_and_own(tmp_path: Path):
    slopes, levels = sections(page_content([write_auto(tmp_path / "one")]))["effects"]
    assert slopes["rows"][0][:2] == ["age, per 9", "2.00 (1.50 to 2.50)"]
    assert [row[0] for row in levels["rows"]] == ["north", "south"]


@pytest.mark.parametrize(
    ("name", "tone", "said"),
    [
        ("north", "good", "change your log loss from 0.3 to 0.25."),
        ("south", "open", "from 0.399 to 0.388; this may be chance."),
    ],
)
def test_the_page_of_a_client_answers(tmp_path: Path, name, tone, said):
    """Also where clients are to train alone; and it names no other client."""
    content = client_content(write_auto(tmp_path / "one", "local_only"), name)
    assert content["tone"] == tone and content["verdict"][0].endswith(said)
    other = next(one for one in CLIENTS if one != name)
    assert other not in json.dumps(content)
    assert content["verdict"][1].endswith("is to train alone.")


def test_a_client_is_found_by_name_or_id(tmp_path: Path):
    folder = write_auto(tmp_path / "one")
    content = client_content(folder, "1")
    assert content["title"] == "south"
    assert content["about"].startswith("ill in ill.csv, by site · 40 rows · ")
    with pytest.raises(RunError, match=r"has no client 'nort'; .*north"):
        client_content(folder, "nort")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "good"),
        ({"who": {"harmed": ["Meadow"]}}, "mixed"),
        ({"p": 0.2}, "open"),
        ({"mean_gain": [0.1, -0.05, 0.25]}, "open"),
        ({"choice": {"method": "local_only"}, "answer": "alone"}, "bad"),
        ({"choice": {"method": "local_only"}, "answer": "open"}, "open"),
    ],
)
def test_the_color_of_the_page_follows_auto(changes, expected):
    found = {"choice": {"method": "shared"}, "answer": "together", "p": 0.01}
    found |= {"mean_gain": [0.1, 0.05, 0.15], "who": {"harmed": []}}
    assert tone({**found, **changes}) == expected


def test_a_damaged_verdict_is_one_line(tmp_path: Path):
    (tmp_path / "auto.json").write_text('{"verdict": ["Deploy."], "findings": 3}')
    with pytest.raises(RunError, match=r"auto\.json: is damaged"):
        page_content([tmp_path])


def test_a_browser_shows_and_prints_it(browser, tmp_path: Path):
    """Every section, with intervals drawn; one sheet of paper has what decides."""
    file = write_page([write_auto(tmp_path / "one")], tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 710, "height": 1000})
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=10_000)
    shown = page.eval_on_selector_all("section.card", "all => all.map(one => one.id)")
    wanted = ["warnings", "methods", "clients", "why", "calibration", "effects", "next"]
    assert shown == wanted
    assert page.locator("#methods svg.interval").count() == 2
    page.emulate_media(media="print")
    assert page.locator("#methods details").first.is_hidden()
    printed = [name for name in wanted if page.locator(f"#{name}").is_visible()]
    assert printed == ["warnings", "methods", "clients"]
    assert page.locator("#methods svg.interval").first.is_visible()
    # Of Letter, which is shorter than A4.
    one_page = 990
    assert page.evaluate("document.body.scrollHeight") < one_page
    page.close()
