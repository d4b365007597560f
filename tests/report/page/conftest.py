# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of synthetic runs."""

from pathlib import Path

import pytest

from fedblend.report.page import write_page
from synthetic_run import write_run

HOSTILE = "</script><img src=x onerror=document.title='taken'>"
"""The name of a client that would be markup where it is not text."""


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 clients and two seeds; client 5 has a hostile name."""
    path = tmp_path_factory.mktemp("page") / "one"
    names = {5: HOSTILE, 7: "hospital-7", 8: "hospital-8"}
    return write_run(path, seeds=(1, 2), names=names, salt=3).path


@pytest.fixture(scope="session")
def page_file(run_folder: Path) -> Path:
    return write_page([run_folder], run_folder.parent / "one.html")


@pytest.fixture(scope="session")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 10,000 clients and 500 rounds."""
    path = tmp_path_factory.mktemp("large") / "run"
    write_run(path, clients=10_000, rounds=500)
    return write_page([path], path / "report.html")
