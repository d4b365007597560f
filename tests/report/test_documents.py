# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents say about configurations is what the configuration accepts."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import registry_tables

from fedblend.config.config import check
from fedblend.config.tables import local_work
from fedblend.config.tables.algorithm import OPTIONS
from fedblend.config.tables.data import AnyData
from fedblend.config.tables.measure import Measure
from fedblend.config.tables.model import NAMED_MODELS, ImportedModel
from fedblend.config.tables.privacy import Privacy
from fedblend.config.tables.run import RunTable

HOME = Path(__file__).parents[2]


def blocks(path: str, language: str) -> list[str]:
    text = (HOME / path).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_the_page_of_first_runs_shows_a_configuration_that_is_valid():
    whole = tomllib.loads(blocks("docs/start.md", "toml")[0])
    config = check(whole, "docs/start.md")
    assert config.name == "first"
    own = tomllib.loads(blocks("docs/start.md", "toml")[1])
    check({**whole, **own}, "docs/start.md")


def test_the_fragments_in_the_key_list_are_valid():
    whole = tomllib.loads(blocks("docs/start.md", "toml")[0])
    for block in blocks("docs/config.md", "toml"):
        check({**whole, **tomllib.loads(block)}, "docs/config.md")


@pytest.mark.parametrize(("page", "place"), [("config", 1), ("start", 2), ("data", 0)])
def test_the_configurations_of_four_keys_are_whole(page, place):
    own = tomllib.loads(blocks(f"docs/{page}.md", "toml")[place])
    assert set(own) == {"data", "algorithm"}
    check(own, f"docs/{page}.md")


def test_the_page_on_installing_has_every_extra():
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    text = (HOME / "docs" / "install.md").read_text(encoding="utf-8")
    for extra in project["optional-dependencies"]:
        assert re.search(rf"^\| `{extra}` \|", text, re.M), extra


def classes() -> dict[str, type]:
    data = get_args(get_args(AnyData)[0])
    rules = [get_args(one)[0] for one in get_args(get_args(local_work.Rule)[0])]
    schedules = get_args(get_args(local_work.Schedule)[0])
    every = [*data, *rules, *schedules, *OPTIONS.values()]
    every += [RunTable, Measure, Privacy]
    models = (*NAMED_MODELS, ImportedModel)
    found = {kind.__name__: kind for kind in [*every, *models]}
    return {name: kind for name, kind in found.items() if hasattr(kind, "model_fields")}


@pytest.mark.parametrize("name", sorted(classes()))
def test_every_key_is_in_the_list(name):
    text = (HOME / "docs" / "config.md").read_text(encoding="utf-8")
    text += registry_tables.page()
    for key in classes()[name].model_fields:  # pyright: ignore
        # alpha is known to every algorithm, to refuse it where it means nothing.
        assert key == "alpha" or f"`{key}`" in text, key


def test_the_tests_that_pin_a_method_exist():
    text = (HOME / "docs" / "conformance.md").read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:(?:adapters|reproductions)/)?tests/[\w/]+\.py)::(\w+)`", text
    )
    assert len(named) == text.count("::") > 25
    for path, name in named:
        assert f"def {name}(" in (HOME / path).read_text(encoding="utf-8"), name
