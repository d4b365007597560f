# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What docs/federation.md shows is what the program takes."""

import re
import tomllib
from pathlib import Path

import pytest
import typer

from fedblend.cli import app
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend_federation.contract import Facts, contract_of
from fedblend_federation.ops.local_cluster import (
    EXPERIMENTS,
    NODES,
    POLICY,
    demo_config,
)
from fedblend_federation.ops.settings import parse_as
from fedblend_federation.policy.policy import Policy

TEXT = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()


def test_the_configuration_can_be_built():
    block, *_, raw = re.findall(r"^```toml\n(.*?)^```", TEXT, re.M | re.S)
    content = tomllib.loads(block)
    contract = contract_of(check(content, "docs/federation.md"))
    assert contract.method(Facts()).algorithm
    assert contract.task.columns == ("age", "dose")
    contract = contract_of(check(content | tomllib.loads(raw), "docs/federation.md"))
    assert contract.method(Facts()).algorithm
    assert contract.task.columns[:2] == ("admitted", "age")


def test_a_node_does_not_tune_the_rate_of_training_alone():
    content = tomllib.loads(re.findall(r"^```toml\n(.*?)^```", TEXT, re.M | re.S)[0])
    content["measure"] = {**content.get("measure", {}), "local_rate": "tune"}
    with pytest.raises(ConfigError, match=r"tune\": is not for a federation"):
        contract_of(check(content, "docs/federation.md"))


def test_the_commands_exist():
    group = typer.main.get_command(app).commands["federation"]  # pyright: ignore
    named = set(re.findall(r"fedblend federation ([a-z]+)", TEXT))
    assert named <= set(group.commands)
    shown = {name for name, command in group.commands.items() if not command.hidden}
    assert shown - named == {"audit"}  # docs/policy.md has it


def test_the_configurations_of_the_demonstration_can_be_built():
    policy = parse_as(Policy, POLICY.encode(), Path())
    for name in EXPERIMENTS:
        contract = contract_of(demo_config(name))
        assert contract.clients == len(NODES)
        assert policy.refusal(contract.config) is None
        assert contract.method(Facts()).algorithm
