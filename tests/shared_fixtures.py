# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A small valid configuration, and programs that are compiled once for a session."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import fedblend_reproductions.datasets  # noqa: F401 (registers the papers' datasets)
from fedblend.config import toml
from fedblend.config.config import check
from fedblend.runs.run import run_config
from fedblend_reproductions.datasets.download import PUBLIC_SETS
from fedblend_reproductions.datasets.download import data_home as home_of_data
from tiny_config import TINY

BROWSER_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture
def tiny() -> dict:
    """A valid configuration as nested tables, to be changed freely."""
    return copy.deepcopy(TINY)


@pytest.fixture
def write(tmp_path: Path):
    """Write tables (or text) to a TOML file and hand out its path."""

    def put(content: dict | str | bytes, name: str = "tiny.toml") -> Path:
        path = tmp_path / name
        text = toml.write(content) if isinstance(content, dict) else content
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return put


@pytest.fixture
def needs() -> Callable[..., None]:
    """Skip a test whose public files are not on this machine: see FEDBLEND_DATA."""

    def check(*names: str) -> None:
        for name in names:
            if not PUBLIC_SETS[name].usable:
                pytest.skip(f"{name} is not in {home_of_data()}; see FEDBLEND_DATA")

    return check


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """What one test compiles, later ones find in a cache."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield names["jax_compilation_cache_dir"]
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, compiled) -> Path:
    """The folder of a finished run of the tiny configuration."""
    out = tmp_path_factory.mktemp("tiny") / "run"
    run_config(check(copy.deepcopy(TINY), "here"), out)
    return out


@pytest.fixture
def copy_run(tiny_run, tmp_path) -> Path:
    """A copy of a finished run of the tiny configuration, to be changed freely."""
    return Path(shutil.copytree(tiny_run, tmp_path / "out"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, or a skip where it is not installed.

    For the tests of one module: its event loop would refuse those of other tests.
    """
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=program, args=list(BROWSER_OPTIONS)
        )
        yield browser
        browser.close()
