# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One registration: a file in the package is all that a new algorithm needs."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from registry_tables import page

import fedblend as fb
from fedblend.registry import ALGORITHMS, TRANSFORMS, Registry

TESTS = Path(__file__).parent
NEW = '''
"""Half steps: FedAvg whose server goes a part of the way.

Reference: Nobody, "Half steps", 2026, arXiv:2601.00000.
"""

from fedblend import trees
from typing import Annotated

from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import Number
from fedblend.core import Algorithm, Loss
from fedblend.local import Work
from fedblend.registry import algorithm


@algorithm()
def half_steps(
    loss: Loss, work: Work, *, part: Annotated[float, Number(above=0, most=1)]
) -> Algorithm:
    """FedAvg, ``part`` of the way."""
    inner = fedavg(loss, work)

    def server(aggregate, down, server, central, key):
        step = trees.scale(part, aggregate.mean.delta)
        return down._replace(shared=trees.add(down.shared, step)), server

    return inner._replace(server=server)
'''
PROGRAM = f"""
import sys
home = sys.argv[2]
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "contract")!r}]
from importlib.util import find_spec, module_from_spec
spec = find_spec(home)
spec.submodule_search_locations.append(sys.argv[1])
sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])

import fedblend as fb
from fedblend.cli import main
assert main(["list", "algorithms"]) == 0
assert fb.algorithms.half_steps.__module__ == home + ".half_steps"

from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend_federation.policy.policy import Policy
from tiny_config import TINY
table = {{**TINY["algorithm"], "name": "half_steps"}}
config = check({{**TINY, "algorithm": {{**table, "part": 0.5}}}}, "here")
assert Policy().refusal(config) is None
for wrong in ({{}}, {{"part": 2}}):
    try:
        check({{**TINY, "algorithm": {{**table, **wrong}}}}, "here")
    except ConfigError as error:
        print(error)

import registry
assert "half_steps" in registry.CASES
from runs import usual_run
usual_run("half_steps")
"""


@pytest.mark.parametrize("home", ["fedblend.algorithms", "fedblend.contrib"])
def test_a_file_in_the_package_is_all_that_a_new_algorithm_needs(tmp_path, home):
    """``fb.algorithms.NAME``, list, config, policy and the contract suite find it."""
    (tmp_path / "half_steps.py").write_text(NEW)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), home],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout
    assert "half_steps" in lines and "FedAvg whose server goes a part" in lines
    assert "2026, arXiv:2601.00000" in lines
    assert "here: algorithm.part: is missing" in lines
    assert "here: algorithm.part: 2 is not in (0, 1]" in lines


def test_two_builders_of_one_name_are_refused():
    found = Registry("fedblend.algorithms")
    found.add(ALGORITHMS["fedavg"])
    with pytest.raises(ValueError, match="'fedavg' is registered twice"):
        found.add(ALGORITHMS["fedavg"])


def test_methods_that_are_not_confirmed_say_so():
    for name, entry in ALGORITHMS.items():
        module = inspect.getmodule(entry.builder)
        assert module and module.__doc__
        there = ".contrib." in module.__name__
        paragraphs = module.__doc__.split("\n\n")
        said = any(one.startswith("In ``contrib``: ") for one in paragraphs[1:2])
        assert there == said, name


@pytest.mark.parametrize("registry", [ALGORITHMS, TRANSFORMS])
def test_every_entry_says_what_it_is(registry):
    assert list(registry) == sorted(registry)
    for name, entry in registry.items():
        assert 10 < len(entry.summary) < 100 and "\n" not in entry.summary, name
        assert entry.reference or name == "local_only", name
        assert set(entry.rules) <= set(entry.parameters), name


def test_a_name_that_is_neither_public_nor_registered():
    with pytest.raises(AttributeError, match="no attribute 'frob'"):
        getattr(fb, "frob")  # noqa: B009


def test_the_page_of_algorithms_has_every_entry():
    shown = page()
    for registry in (ALGORITHMS, TRANSFORMS):
        assert not [name for name in registry if f"| `{name}` |" not in shown]
