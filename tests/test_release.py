# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a release relies on: one version, all slow tests run, no path of a machine."""

import re
import tomllib
from pathlib import Path

import release
import slow_tests

import fedblend

ROOT = Path(__file__).parents[1]
MACHINE = re.compile(r"/(?:work|root|Users|mnt)/\w|/home/(?!me\b)\w")
FOLDERS = (
    *("src", "adapters", "federation", "interop", "reproductions", "tests"),
    *("benchmarks", "docs", "examples", "tools"),
)
SUFFIXES = {".py", ".pyi", ".md", ".toml", ".json", ".sh", ".yml", ".yaml", ".html"}


def test_the_distributions_have_one_version():
    versions = set()
    for folder in release.FOLDERS.values():
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        versions.add(tomllib.loads(text)["project"]["version"])
        versions |= set(re.findall(r'"fedblend[\w\[\],-]*==([^"]*)"', text))
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    versions |= set(re.findall(r"^version: (.*)$", cited, re.MULTILINE))
    assert versions == {fedblend.__version__}


def test_every_test_is_in_a_group_of_slow_tests():
    grouped = [ROOT / path for paths in slow_tests.groups().values() for path in paths]
    for suite in slow_tests.SUITES:
        for file in (ROOT / suite).rglob("test_*.py"):
            assert sum(file.is_relative_to(path) for path in grouped) == 1, file


def test_no_file_names_a_path_of_a_machine():
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    for folder in FOLDERS:
        files += [
            file for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES
        ]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    assert len(texts) > 1000
    assert [file for file, text in texts.items() if MACHINE.search(text)] == []
