# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The distribution: what brings it, and what it stands on."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_extra_of_fedblend_brings_it():
    own, whole = project(ROOT / "adapters"), project(ROOT)
    (extra,) = whole["optional-dependencies"]["adapters"]
    assert extra == f"{own['name']}=={own['version']}"
    assert f"{whole['name']}=={whole['version']}" in own["dependencies"]
