# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The report of 10,000 clients and 500 rounds: how large, how soon it can be used.

Needs Chromium and playwright. Times are medians of five openings of the file, each in a
browser context of its own: until the page can be used, and until the table of
clients is sorted anew.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedblend.report.page import write_page
from synthetic_run import write_run

TURNS = 5
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SORT = """() => {
    const heads = [...document.querySelectorAll('#clients thead button')];
    const begun = performance.now();
    heads.find(head => head.textContent === 'Gain').click();
    return performance.now() - begun;
}"""


def opened(browser: Any, file: Path) -> tuple[float, float]:
    """Seconds until the page can be used, and of sorting."""
    context = browser.new_context()
    page = context.new_page()
    begun = time.perf_counter()
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector("#clients tbody tr[data-at]")
    ready = time.perf_counter() - begun
    sorting = page.evaluate(SORT) / 1000
    context.close()
    return ready, sorting


def main() -> None:
    """Print the size and the times."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as place:
        folder = write_run(Path(place) / "run", clients=10_000, rounds=500).path
        begun = time.perf_counter()
        file = write_page([folder], folder / "report.html")
        writing = time.perf_counter() - begun
        print(f"written in {writing:.2f} s, {file.stat().st_size / 1e6:.2f} MB")
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=program, args=OPTIONS)
            times = [opened(browser, file) for _ in range(TURNS)]
            browser.close()
    columns = zip(*times, strict=True)
    for name, of in zip(("can be used after", "sorts in"), columns, strict=True):
        print(f"{name} {statistics.median(of):.2f} s (least {min(of):.2f} s)")


if __name__ == "__main__":
    main()
