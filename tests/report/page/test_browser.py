# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: what a reader sees, clicks and types."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedblend.report.page import write_page
from fedblend.report.page.content import page_content
from fedblend.report.page.document import document
from synthetic_run import write_run

HOSTILE = "</script><img src=x onerror=document.title='taken'>"
ROWS = "#clients tbody tr[data-at]"
SELECTED = "#clients tr[aria-selected=true] th"


@contextmanager
def opened(browser: Any, file: Path, **context: Any) -> Iterator[Any]:
    """A page in a context of its own; no console message, no request but the file."""
    held = browser.new_context(**context)
    page, noise = held.new_page(), []
    page.on("console", lambda message: noise.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: noise.append(f"error: {error}"))
    page.on("request", lambda request: noise.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=10_000)
    yield page
    assert set(noise) == {file.as_uri()}
    held.close()


@pytest.fixture(scope="module")
def page(browser: Any, page_file: Path) -> Iterator[Any]:
    with opened(browser, page_file, viewport={"width": 1200, "height": 900}) as page:
        yield page


def first_cells(page: Any, column: int) -> list[str]:
    """A column of the rows of the table of clients that are in view."""
    return page.eval_on_selector_all(
        ROWS, f"rows => rows.map(row => row.cells[{column}].innerText)"
    )


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_numbers_of_the_results_are_those_of_the_run(page: Any, run_folder: Path):
    summary = json.loads((run_folder / "summary.json").read_text())
    shown = page.eval_on_selector_all(
        "#results > .scroll tbody tr",
        "rows => rows.map(row => [...row.cells].map(c => c.innerText))",
    )
    words = {"Training alone": "local", "Personal model": "personal"}
    assert len(shown) == 6
    for model, metric, *numbers in shown:
        path = "test", words.get(model, "shared"), metric
        for cell, of in zip(
            numbers[:1] + numbers[2:],
            ("mean", "std", "worst_tenth", "worst"),
            strict=True,
        ):
            values = []
            for run in summary["runs"]:
                spread = run["measures"]
                for key in path:
                    spread = spread[key]
                values.append(spread[of])
            assert cell == f"{sum(values) / len(values):.4f}"


def test_the_numbers_of_every_client_are_those_of_the_run(page: Any, run_folder: Path):
    harm = {row["name"]: row for row in read(run_folder / "harm.csv")}
    alphas = {row["name"]: row["alpha"] for row in read(run_folder / "clients.csv")}
    heads = page.eval_on_selector_all(
        "#clients thead th", "heads => heads.map(head => head.innerText.trim())"
    )
    shown = page.eval_on_selector_all(
        ROWS, "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert len(shown) > 10
    for cells in (dict(zip(heads, row, strict=True)) for row in shown):
        row = harm[cells["Client"]]
        gain = float(row["gain_over_local"])
        assert cells["Gain"].replace("\N{MINUS SIGN}", "-") == f"{gain:+.4f}".replace(
            "+0.0000", "0.0000"
        )
        assert cells["Personal model"] == f"{float(row['personal_accuracy']):.4f}"
        assert cells["Training rows"] == row["train"]
        assert cells["Alpha"] == f"{float(alphas[cells['Client']]):.4f}"


def test_harmed_clients_come_first(page: Any):
    states = first_cells(page, 1)
    assert states[:3] == ["worse off"] * 3
    assert "worse off" not in states[3:]


def test_a_column_sorts_both_ways_by_mouse(page: Any):
    head = page.locator("#clients thead th", has_text="Training rows")
    head.locator("button").click()
    down = [int(cell) for cell in first_cells(page, 7)]
    assert down == sorted(down, reverse=True) and len(set(down)) > 3
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    up = [int(cell) for cell in first_cells(page, 7)]
    assert up == sorted(up) and head.get_attribute("aria-sort") == "ascending"


def test_filters_narrow_the_clients(page: Any):
    page.fill("#clients input[type=search]", "hospital")
    assert sorted(first_cells(page, 0)) == ["hospital-7", "hospital-8"]
    assert page.inner_text("#clients .counted") == "2 of 30 clients"
    page.fill("#clients input[type=search]", "")
    page.locator("#clients label", has_text="Show").locator("select").select_option(
        "harmed"
    )
    assert set(first_cells(page, 1)) == {"worse off"}
    assert page.inner_text("#clients .counted") == "3 of 30 clients"
    page.fill("#clients input[type=search]", "nobody")
    assert "No client matches." in page.inner_text("#clients tbody")
    page.fill("#clients input[type=search]", "")
    page.locator("#clients label", has_text="Show").locator("select").select_option(
        "all"
    )


def test_a_client_is_selected_by_mouse_and_by_keyboard(page: Any):
    page.click(f"{ROWS} >> nth=2")
    first = page.inner_text(SELECTED)
    assert page.inner_text("#client h3").startswith(first)
    page.focus(f"{ROWS} >> nth=0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    second = page.inner_text(SELECTED)
    assert second == first_cells(page, 0)[3] != first
    assert page.inner_text("#client h3").startswith(second)
    assert page.evaluate("document.activeElement.tagName") == "H3"


def test_the_keyboard_reaches_the_last_client(page: Any):
    page.focus(f"{ROWS} >> nth=0")
    page.keyboard.press("End")
    index = page.evaluate("document.activeElement.getAttribute('aria-rowindex')")
    assert index == "31"
    page.keyboard.press("Home")
    index = page.evaluate("document.activeElement.getAttribute('aria-rowindex')")
    assert index == "2"


def test_a_point_of_the_chart_selects_its_client(page: Any):
    page.locator("#clients .plot").scroll_into_view_if_needed()
    found = page.evaluate(
        """() => {
        const over = document.querySelector('#clients .u-over');
        const box = over.getBoundingClientRect();
        const tip = document.querySelector('#clients .tip');
        for (let x = 4; x < box.width; x += 6) for (let y = 4; y < box.height; y += 6) {
            const at = {clientX: box.left + x, clientY: box.top + y, bubbles: true};
            over.dispatchEvent(new MouseEvent('mousemove', at));
            if (!tip.hidden) return [tip.textContent, at.clientX, at.clientY];
        }
        }"""
    )
    page.mouse.click(*found[1:])
    name, _, gain = found[0].rpartition(": ")
    assert page.inner_text("#client h3").startswith(name)
    assert gain in page.inner_text("#client .gain >> nth=0")


def test_curves_change_with_their_controls(page: Any):
    def label() -> str:
        return page.get_attribute("#curves .plot", "aria-label")

    before = label()
    page.locator("#curves label", has_text="Against").locator("select").select_option(
        "both"
    )
    page.locator("#curves label", has_text="Metric").locator("select").select_option(
        "loss"
    )
    assert "bits, both ways" in label() and label() != before
    page.locator("#curves .legend button >> nth=0").click()
    assert (
        page.get_attribute("#curves .legend button >> nth=0", "aria-pressed") == "false"
    )
    assert page.locator("#curves canvas").count() == 1


def test_a_hostile_name_is_text(page: Any):
    page.fill("#clients input[type=search]", "onerror")
    assert first_cells(page, 0) == [HOSTILE]
    page.click(f"{ROWS} >> nth=0")
    assert page.inner_text("#client h3").startswith(HOSTILE)
    assert page.locator("img").count() == 0
    assert page.title() == "made · fedblend report"
    page.fill("#clients input[type=search]", "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_no_barrier(browser: Any, page_file: Path, scheme: str):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, page_file, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.click(f"{ROWS} >> nth=1")
        page.evaluate(
            "document.querySelectorAll('details').forEach(d => d.open = true)"
        )
        found = axe.run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []


def test_a_phone_scrolls_one_way_only(browser: Any, page_file: Path):
    with opened(browser, page_file, viewport={"width": 360, "height": 740}) as page:
        page.click(f"{ROWS} >> nth=1")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_paper_shows_what_the_screen_folds(browser: Any, page_file: Path):
    with opened(browser, page_file, color_scheme="dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert page.locator(ROWS).count() == 30
        assert page.locator("details:not([open])").count() == 0
        assert not page.is_visible("#contents")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert len(page.pdf()) > 10_000


def test_runs_stand_side_by_side_and_alpha_is_swept(browser: Any, tmp_path: Path):
    folders = [
        write_run(tmp_path / f"alpha-{alpha}", alpha=alpha, name=f"alpha-{alpha}").path
        for alpha in (0.1, 0.4, 0.7)
    ]
    content = page_content(folders) | {"verdict": ["Deploy <b>this</b>."]}
    file = tmp_path / "all.html"
    file.write_text(document(content))
    with opened(browser, file) as page:
        names = page.eval_on_selector_all(
            "#compare tbody tr", "rows => rows.map(row => row.cells[0].innerText)"
        )
        assert sorted(names) == ["alpha-0.1", "alpha-0.4", "alpha-0.7"]
        assert "alpha" in page.get_attribute("#sweep .plot", "aria-label")
        assert page.inner_text("#verdict-lines") == "Deploy <b>this</b>."
        page.locator("#clients label", has_text="Run").locator("select").select_option(
            "alpha-0.7"
        )
        page.click(f"{ROWS} >> nth=0")
        assert "in every run" in page.inner_text("#client")


def test_one_client_gets_a_page_of_its_own(browser: Any, run_folder: Path, tmp_path):
    file = write_page([run_folder], tmp_path / "own.html", client="hospital-7")
    with opened(browser, file) as page:
        assert page.inner_text("h1") == "hospital-7"
        text = page.inner_text("body")
    assert "hospital-8" not in text and "Your models" in text


def test_ten_thousand_clients_open_quickly(browser: Any, large_page: Path):
    """The bar is 3 s for an idle machine; tests run beside others, so twice that."""
    with opened(browser, large_page) as page:
        ready = page.evaluate("performance.now()")
        assert page.locator(ROWS).count() < 100
        page.locator("#clients thead th", has_text="Gain").locator("button").click()
        assert page.inner_text("#clients .counted") == "10,000 of 10,000 clients"
    assert ready < 6_000
