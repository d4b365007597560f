# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The distribution: what brings it, what fedblend alone knows of it."""

import tomllib
from pathlib import Path
from typing import get_args

import fedblend as fb
from fedblend.config.tables.adapt import Adapt
from fedblend.errors import ELSEWHERE
from fedblend.registry import ALGORITHMS
from fedblend_adapters.adapt import BaseDtype
from fedblend_adapters.kinds import KINDS

ROOT = Path(__file__).parents[2]


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_extra_of_fedblend_brings_it():
    own, whole = project(ROOT / "adapters"), project(ROOT)
    (extra,) = whole["optional-dependencies"]["adapters"]
    assert extra == f"{own['name']}=={own['version']}"
    assert f"{whole['name']}=={whole['version']}" in own["dependencies"]


def test_a_configuration_takes_what_this_package_makes():
    fields = Adapt.model_fields
    assert get_args(fields["how"].annotation) == tuple(KINDS)
    (words, _) = get_args(fields["dtype"].annotation)
    assert get_args(words) == get_args(BaseDtype)


def test_the_names_that_fedblend_sends_here_are_here():
    names = {name for name, extra in ELSEWHERE.items() if extra == "adapters"}
    methods = {
        name
        for name, entry in ALGORITHMS.items()
        if entry.builder.__module__.startswith("fedblend_adapters.")
    }
    assert methods == names & set(ALGORITHMS)
    assert all(hasattr(fb.adapt, name) for name in names - methods)
